"""Everything but generation, on counts of devices by kind: which groups of tasks, on which blocks, and how fast at best.

A workflow of several tasks runs as one group or as two on devices of their own. All blocks, and all pairs of blocks of two
kinds, are costed at once for every set of tasks (`planner.cost.batch`); where devices lie is relaxed (`planner.relaxed`). A
cell is a total of devices by kind; its time is the least over the ways to divide tasks and devices.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.columns import Columns
from planner.cost.batch import Batch
from planner.cost.model import CostModel
from planner.cost.network import local_link
from planner.cost.parts import Block, Hop
from planner.lanes import Straggler
from planner.mixed_sides import MixedBatch, mixed_pairs
from planner.plan import Task
from planner.record import record, replace
from planner.relaxed import Relaxed
from planner.space import BlockShape, DeviceClass, block_shapes
from planner.workflow import groupings

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
Flags = NDArray[np.bool_]
MOST_GROUPS = 2
_MOST_USAGES = 4000  # beyond, pairs of groups are too many to look at
_MOST_SHAPES = 400_000  # blocks and pairs of blocks
_CHUNK = 9216


def few_shapes(cost: CostModel, classes: Sequence[DeviceClass]) -> bool:
    """Whether the pairs of blocks of a fleet are few enough to be costed all at once."""
    sizes: dict[str, list[int]] = {}
    for c in classes:
        sizes.setdefault(c.place.kind, []).append(c.size)
    blocks = [len(block_shapes(cost.problem, k, tuple(n), sum(n))) for k, n in sizes.items()]
    pairs = sum(blocks) ** 2 - sum(n * n for n in blocks)
    return pairs + sum(blocks) <= _MOST_SHAPES


@record
class Way:
    """One way to divide the tasks among groups, each on its blocks; `side_s` seconds, relaxed."""

    side_s: float
    tasks: tuple[tuple[Task, ...], ...]
    blocks: tuple[tuple[BlockShape, ...], ...]


class Sides:
    """The ways of one problem to run all tasks but generation."""

    def __init__(self, columns: Columns, classes: Sequence[DeviceClass]) -> None:
        self.columns, self.cost = columns, columns.cost
        self.relaxed = Relaxed(columns, classes)
        self.kinds = self.relaxed.kinds
        problem = self.cost.problem
        of_kind = self.relaxed.of_kind
        self.room = [sum(c.size - len(c.must_roll) for c in of_kind[k]) for k in self.kinds]
        self.blocks = {
            k: block_shapes(problem, k, tuple(c.size for c in of_kind[k]), n)
            for k, n in zip(self.kinds, self.room, strict=True)
        }
        # What else fits on devices of a group is asked where they are shared; nothing asks over regions.
        self.hosts = self.cost.shares_devices and len({c.place.region for c in classes}) == 1
        self.partitions = groupings(self.cost.side_tasks, min(problem.capabilities.task_groups, MOST_GROUPS))
        self._cost_all()
        if len(self.usages) > _MOST_USAGES:
            self.partitions = self.partitions[:1]

    @property
    def whole(self) -> bool:
        """Whether every number of groups that the problem allows is looked at."""
        return len(self.partitions) == len(groupings(self.cost.side_tasks, self.cost.problem.capabilities.task_groups))

    # One group.

    @functools.cached_property
    def _straggler(self) -> Straggler:
        return Straggler(self.cost)

    def _cost_all(self) -> None:
        """All candidates (blocks of a group) with their seconds for every set of tasks, sorted by the devices they use."""
        groups = tuple(dict.fromkeys(g for way in self.partitions for g in way))
        made = {k: self._block(k) for k in self.kinds if self.blocks[k]}
        chains: list[tuple[tuple[str, ...], tuple[Ints, ...]]] = []  # kinds, and which of their blocks
        places: list[Ints] = []  # of candidates among all: equals keep this order
        seconds: dict[tuple[Task, ...], list[tuple[Array, Array]]] = {g: [] for g in groups}
        memory: dict[tuple[Task, ...], list[Array]] = {g: [] for g in groups}
        hosts, last = self.hosts, 0
        for kinds in self._chains():
            sizes, first = [len(self.blocks[k]) for k in kinds], last
            last += math.prod(sizes)
            for at in self._chunks(kinds, made):
                chains.append((kinds, at))
                places.append(first + np.ravel_multi_index(at, sizes))
                blocks = [made[k].take(x) for k, x in zip(kinds, at, strict=True)]
                self._time(groups, kinds, at, blocks, seconds=seconds, memory=memory)
        self._piped = len(chains)
        for pair, at in mixed_pairs(self.relaxed, self.blocks):
            chains.append((pair, at))
            places.append(last + np.arange(len(at[0])))
            last += len(at[0])
            some = [[self.blocks[k][int(i)] for i in x] for k, x in zip(pair, at, strict=True)]
            crosses = _leaves(self._used(pair, at), self.relaxed.room_by_region)
            mixed = MixedBatch(self._straggler, self.relaxed, some, crosses)
            for g in groups:
                seconds[g].append(mixed.group_s(g))
                memory[g].append(np.zeros((4, len(at[0])), dtype=np.float32))  # no room: not looked at
        used = np.concatenate([self._used(*c) for c in chains] or [np.zeros((0, len(self.kinds)), dtype=int)])
        both = {
            g: [np.concatenate([s[i] for s in parts] or [np.zeros(0)]) for i in (0, 1)] for g, parts in seconds.items()
        }
        alive = np.zeros(len(used), dtype=bool)
        for score, train in both.values():
            alive |= np.isfinite(score + train)
        order = np.flatnonzero(alive)
        if len(order):
            order = order[np.lexsort([np.concatenate(places)[order], *used[order].T])]
        self._chains_made, self._order = chains, order
        self._ends = np.cumsum([len(at[0]) for _, at in chains])
        self.seconds = {g: (score[order], train[order]) for g, (score, train) in both.items()}
        # By group, where devices are shared: room beside it by block, and what it holds there, as `Batch.memory` has them.
        none = np.zeros((4, 0), dtype=np.float32)
        self.memory = (
            {g: np.concatenate([none, *parts], axis=1)[:, order] for g, parts in memory.items()} if hosts else {}
        )
        by_chain = [[-1] * (2 - len(ks)) + [self.kinds.index(k) for k in ks] for ks, _ in chains]
        counts = np.array([len(at[0]) for _, at in chains], dtype=int)
        # The kind of either block of each candidate, -1 where there is none.
        self.block_kinds = np.repeat(np.array(by_chain, dtype=int).reshape(-1, 2), counts, axis=0)[order]
        used = used[order]
        fresh = np.ones(len(order), dtype=bool)
        fresh[1:] = (used[1:] != used[:-1]).any(axis=1)
        self._least: dict[tuple[Task, ...], tuple[Array, Array, Array]] = {}
        self.starts = np.append(np.flatnonzero(fresh), len(order))
        self.usage = used[fresh]
        self.usages = [tuple(int(x) for x in row) for row in self.usage]
        self.at = {u: i for i, u in enumerate(self.usages)}

    def _time(
        self,
        groups: Sequence[tuple[Task, ...]],
        kinds: tuple[str, ...],
        at: tuple[Ints, ...],
        blocks: Sequence[Block],
        *,
        seconds: Mapping[tuple[Task, ...], list[tuple[Array, Array]]],
        memory: Mapping[tuple[Task, ...], list[Array]],
    ) -> None:
        """Add what every set of tasks takes and leaves on some candidates to `seconds` and, where asked for, `memory`."""
        hop = self._hop(kinds, self._used(kinds, at))
        for has_head in (True, False):
            mine = [g for g in groups if (self._lead(g) in ("actor_training", "reference")) == has_head]
            if mine:
                batch = Batch(
                    self.cost.context,
                    blocks[0] if len(kinds) == 2 else None,
                    blocks[-1],
                    self.relaxed.link(*kinds) if len(kinds) == 2 else None,
                    self.columns.head_layers if has_head else 0.0,
                    hop=hop,
                    hosts=self.hosts,
                )
                for g in mine:
                    seconds[g].append(batch.group_s(g))
                    if self.hosts:
                        memory[g].append(np.concatenate(batch.memory(g), dtype=np.float32))

    def _chains(self) -> Iterator[tuple[str, ...]]:
        """Kinds along the pipeline of a group."""
        yield from ((k,) for k in self.kinds)
        if self.cost.problem.capabilities.train_max_kinds >= 2:
            yield from itertools.permutations(self.kinds, 2)

    @staticmethod
    def _lead(group: tuple[Task, ...]) -> Task:
        return "actor_training" if "actor_training" in group else group[0]

    def _chunks(self, kinds: tuple[str, ...], made: Mapping[str, Block]) -> Iterator[tuple[Ints, ...]]:
        """All blocks, or pairs of blocks, of these kinds by position, in parts that stay in a processor's cache; those whose
        devices hold the least part of a model come first (`Batch` times what comes after no better than what fits)."""
        sizes = [len(self.blocks[k]) for k in kinds]
        limit = self.cost.problem.capabilities.train_max_devices
        at = tuple(x.ravel() for x in np.indices(sizes))
        if limit is not None:
            counts = [np.array([b.devices for b in self.blocks[k]], dtype=int) for k in kinds]
            keep = sum((c[x] for c, x in zip(counts, at, strict=True)), np.zeros(len(at[0]), dtype=int)) <= limit
            at = tuple(x[keep] for x in at)
        blocks = [made[k].take(x) for k, x in zip(kinds, at, strict=True) if k in made]
        room = [self.cost.context.kind(b.kind).memory_bytes for b in blocks]
        total = sum((b.pp * b.weight for b in blocks), np.zeros(len(at[0])))  # layers are divided by weight
        ranks = [b.dp if self.cost.context.trainer == "fsdp" else 1 for b in blocks]
        held = [b.weight / total / (b.tp * n * m) for b, n, m in zip(blocks, ranks, room, strict=True)]
        by_size = np.argsort(np.max(held, axis=0), kind="stable") if held else np.arange(0)
        for part in np.array_split(by_size, -(-len(by_size) // _CHUNK)) if len(by_size) else ():
            yield tuple(x[part] for x in at)

    def _used(self, kinds: tuple[str, ...], at: tuple[Ints, ...]) -> Ints:
        out = np.zeros((len(at[0]), len(self.kinds)), dtype=int)
        for k, x in zip(kinds, at, strict=True):
            out[:, self.kinds.index(k)] = np.array([b.devices for b in self.blocks[k]], dtype=int)[x]
        return out

    def _hop(self, kinds: tuple[str, ...], used: Ints) -> Hop | None:
        """How totals by kind of these kinds leave a machine, and a region, that does not hold them."""
        between = self.relaxed.hop(kinds)
        if between is None:
            return None
        latency_s, bytes_per_s = np.zeros(len(used)), np.full(len(used), np.inf)
        for rooms, link in (
            (self.relaxed.room_by_machine, between),
            (self.relaxed.room_by_region, self.relaxed.bridge),
        ):
            if link is not None:
                leaves = _leaves(used, rooms)
                latency_s[leaves], bytes_per_s[leaves] = link.latency_s, link.bytes_per_s
        return Hop(latency_s=latency_s, bytes_per_s=bytes_per_s)

    def candidate(self, position: int) -> tuple[BlockShape, ...]:
        """The blocks of a candidate, by its position in `seconds`."""
        flat = int(self._order[position])
        chain = int(np.searchsorted(self._ends, flat, side="right"))
        kinds, at = self._chains_made[chain]
        inside = flat - (int(self._ends[chain - 1]) if chain else 0)
        found = [self.blocks[k][int(x[inside])] for k, x in zip(kinds, at, strict=True)]
        if chain >= self._piped:  # ranks of one stage
            found[1] = replace(found[1], joins=True)
        return tuple(found)

    def _block(self, kind: str) -> Block:
        """All blocks of a kind."""
        cluster = self.cost.problem.cluster
        rows = []
        for b in self.blocks[kind]:
            spread = self.relaxed.spread(b)
            nodes = 0 if spread is None else spread.nodes
            rows.append((b.tp, b.dp, b.pp, self.columns.column(b).weight, self.cost.skew(b.dp), nodes))
        table = np.array(rows, dtype=float).T
        tp, dp, pp, nodes_ = (table[i].astype(int) for i in (0, 1, 2, 5))
        return Block(
            kind=kind,
            tp=tp,
            dp=dp,
            pp=pp,
            weight=table[3],
            skew=table[4],
            nodes=nodes_,
            local=local_link(cluster, cluster.kinds[kind]),
            remote=self.relaxed.remote(kind),
            inner=self.relaxed.link(kind, kind),
        )

    def least(self, group: tuple[Task, ...]) -> tuple[Array, Array, Array]:
        """By usage: the least seconds of scoring, of training, and of both together on one candidate."""
        if group not in self._least:
            score, train = self.seconds[group]
            at = self.starts[:-1]
            none = np.zeros(0)
            found = [np.minimum.reduceat(x, at) if len(at) else none for x in (score, train, score + train)]
            self._least[group] = found[0], found[1], found[2]
        return self._least[group]

    # All groups.

    def cells(self) -> tuple[Ints, Flags, Array]:
        """Totals of devices by kind (one row each), which kinds the group that trains the actor takes of them, and least
        seconds of all tasks but generation so. A lower bound where groups are apart (each phase of a group on its best
        blocks), the time itself where there is one group."""
        if not self.usages:
            none = np.zeros((0, len(self.kinds)))
            return none.astype(int), none.astype(bool), np.zeros(0)
        low = {g: self.least(g) for g in self.seconds}
        if len(self.partitions) == 1:
            alone = low[self.partitions[0][0]][2]
            known = np.isfinite(alone)
            return self.usage[known], self.usage[known] > 0, alone[known]
        room = np.array(self.room)
        strides = np.cumprod([1, *(n + 1 for n in self.room[:-1])])
        takes, actor = np.unique(self.usage > 0, axis=0, return_inverse=True)
        actor = np.asarray(actor).reshape(-1)
        table = np.full((len(takes), int(np.prod(room + 1))), np.inf)
        flat = self.usage @ strides
        np.minimum.at(table, (actor, flat), low[self.partitions[0][0]][2])
        # By grouping and usage, the least seconds of scoring and of training of the first group and of the second.
        first, second = ([np.stack([low[way[x]][p] for way in self.partitions[1:]]) for p in (0, 1)] for x in (0, 1))
        for i in np.flatnonzero(np.isfinite(first[0] + first[1]).any(axis=0)):
            rest = np.flatnonzero((self.usage <= room - self.usage[i]).all(axis=1))
            ways = [np.maximum(a[:, i, None], b[:, rest]) for a, b in zip(first, second, strict=True)]
            least = (ways[0] + ways[1]).min(axis=0)
            # Each total of devices comes up once.
            total = flat[rest] + flat[i]
            table[actor[i], total] = np.minimum(table[actor[i], total], least)
        group, at = np.nonzero(np.isfinite(table))
        used = np.stack([(at // s) % (n + 1) for s, n in zip(strides, self.room, strict=True)], axis=1)
        return used, takes[group], table[group, at]

    def ways(self, used: tuple[int, ...], actor: tuple[bool, ...], below_s: float) -> Iterator[Way]:
        """The ways on exactly these devices, the actor trained on just these kinds, that take less than `below_s`; best
        first within each division of devices."""
        for low_s, way, i, j in self.splits(used, actor, below_s):
            if low_s < below_s:
                yield from self._within(way, i, j, below_s)

    def best(self, used: tuple[int, ...], actor: tuple[bool, ...], below_s: float) -> Way | None:
        """The fastest of `ways`; None where there is none."""
        found: Way | None = None
        for low_s, way, i, j in self.splits(used, actor, below_s):
            limit = below_s if found is None else found.side_s
            if low_s >= limit:
                break
            found = next(self._within(way, i, j, limit), found)
        return found

    def splits(
        self, used: tuple[int, ...], actor: tuple[bool, ...], below_s: float
    ) -> list[tuple[float, tuple[tuple[Task, ...], ...], int, int]]:
        """(lower bound, grouping, usage of the first group, of the second or -1), least bound first."""
        found: list[tuple[float, int, int, int]] = []
        whole = self.at.get(used, -1)
        others = self._others(used)
        trains = ((self.usage > 0) == np.array(actor)).all(axis=1)  # the first group trains the actor
        firsts = np.flatnonzero((others >= 0) & trains)
        for p, way in enumerate(self.partitions):
            low = [self.least(g) for g in way]
            if len(way) == 1:
                if whole >= 0 and trains[whole]:
                    found.append((float(low[0][2][whole]), p, whole, -1))
                continue
            seconds = np.maximum(low[0][0][firsts], low[1][0][others[firsts]])
            seconds = seconds + np.maximum(low[0][1][firsts], low[1][1][others[firsts]])
            found += [
                (float(seconds[x]), p, int(firsts[x]), int(others[firsts[x]]))
                for x in np.flatnonzero(seconds < below_s)
            ]
        return [(s, self.partitions[p], i, j) for s, p, i, j in sorted(found) if s < below_s]

    def _others(self, used: tuple[int, ...]) -> Ints:
        """By usage: that of the devices which are left of these; -1 where there is none."""
        strides = np.cumprod([1, *(n + 1 for n in self.room[:-1])])
        known, left = self.usage @ strides, np.array(used) - self.usage  # `known` ascends as usages are sorted
        at = np.minimum(np.searchsorted(known, left @ strides), max(0, len(known) - 1))
        return np.where((left >= 0).all(axis=1) & (self.usage[at] == left).all(axis=1), at, -1)

    def _within(self, way: tuple[tuple[Task, ...], ...], i: int, j: int, below_s: float) -> Iterator[Way]:
        """The ways of one division of devices, fastest first."""
        spans = [slice(self.starts[x], self.starts[x + 1]) for x in (i, j) if x >= 0]
        parts = [[x[span] for x in self.seconds[g]] for g, span in zip(way, spans, strict=True)]
        if len(parts) == 1:
            seconds = (parts[0][0] + parts[0][1])[:, None]
        else:
            seconds = np.maximum.outer(parts[0][0], parts[1][0]) + np.maximum.outer(parts[0][1], parts[1][1])
        below = np.flatnonzero(seconds < below_s)
        for flat in _ascending(below, seconds.ravel()[below]):
            x, y = divmod(int(flat), seconds.shape[1])
            blocks = [self.candidate(int(spans[0].start) + x)]
            if len(spans) == 2:
                blocks.append(self.candidate(int(spans[1].start) + y))
            yield Way(side_s=float(seconds[x, y]), tasks=way, blocks=tuple(blocks))


def _ascending(positions: Ints, figures: Array) -> Iterator[int]:
    """The positions in the order of their figures; beyond the first, sorted only when asked for."""
    if len(positions):
        yield int(positions[figures.argmin()])
        yield from (int(x) for x in positions[np.argsort(figures, kind="stable")[1:]])


def _leaves(used: Ints, rooms: Sequence[Sequence[int]]) -> Flags:
    """Which of these totals by kind no room holds."""
    held = np.array([(used <= room).all(axis=1) for room in rooms])
    return np.asarray(~held.any(axis=0))
