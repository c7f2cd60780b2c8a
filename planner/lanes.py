"""Lanes: blocks of a trainer that differ in their DP degree only, costed for all degrees at once.

A lane is (kind, TP, PP). Everything here is a lower bound that never rises with more workers, so that a range of degrees is
bounded by the figures at its upper end, and what does rise with them (fewer micro-batches, one straggler, more machines
in a collective) by those at its lower end.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.columns import FIELDS, Columns
from planner.cost.flops import hbm_rate
from planner.cost.lengths import quantiles
from planner.cost.memory import state_bytes_per_param
from planner.cost.model import CostModel
from planner.cost.network import best_of, local_link
from planner.cost.training import IMBALANCE_DRAWS, crossing_s, split_layers
from planner.pools import Pools
from planner.space import BlockShape, tp_degrees

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Table:
    """One (kind, TP), by DP degree: index 0 is unused. Seconds are for a whole batch and one layer of one stage."""

    def __init__(self, columns: Columns, kind: str, tp: int) -> None:
        self.columns, self.kind, self.tp = columns, kind, tp
        self.values = np.full((len(FIELDS), 1), np.nan)

    def upto(self, dp: int) -> Floats:
        """[field, dp] for degrees of at least `dp`."""
        have = self.values.shape[1]
        if dp >= have:
            more = [
                self.columns.column(BlockShape(kind=self.kind, tp=self.tp, dp=d, pp=1)) for d in range(have, dp + 1)
            ]
            rows = np.array([[getattr(c, f) for f in FIELDS] for c in more], dtype=float).T
            self.values = np.concatenate([self.values, rows], axis=1)
        return self.values


class Straggler:
    """How much longer the fullest DP worker takes than the mean one, at least (cf. `cost.training.imbalance`)."""

    def __init__(self, cost: CostModel) -> None:
        ctx, samples = cost.context, cost.problem.workload.samples_per_step
        self.draws = min(samples, IMBALANCE_DRAWS)
        lengths = ctx.m.prompt + quantiles(ctx.workload.response, self.draws)
        self.longest = float(lengths[-1] / lengths.sum())
        self.shortest = np.concatenate([[0.0], np.cumsum(lengths)]) / lengths.sum()
        # With more workers than draws there is a draw for each; the mean of any number of draws is below this.
        most_mean = ctx.m.prompt + ctx.m.response + ctx.workload.response.max_tokens / (2 * IMBALANCE_DRAWS)
        self.beyond = max(1.0, float(lengths[-1]) / most_mean)

    def least(self, low_dp: Ints) -> Floats:
        """For any degree of at least `low_dp`: some worker has the longest sequence."""
        found: Floats = np.minimum(np.maximum(1.0, self.longest * low_dp), self.beyond)
        return found

    def exactly(self, dp: Ints) -> Floats:
        """For that degree: some worker has at least the mean number of sequences, rounded up."""
        count = -(-self.draws // dp)
        many = np.where(dp <= self.draws, self.shortest[np.minimum(count, self.draws)] * dp, 1.0)
        found: Floats = np.maximum(self.least(dp), many)
        return found


class Lanes:
    """The lanes of a fleet. Axis n: lanes; `values` [field, at]: the tables behind each other, lane n from `start[n]`."""

    def __init__(self, cost: CostModel, columns: Columns, pools: Pools, tables: dict[tuple[str, int], Table]) -> None:
        self.cost, self.pools = cost, pools
        problem, model = cost.problem, cost.problem.model
        caps = problem.capabilities
        samples = problem.workload.samples_per_step
        self.straggler = Straggler(cost)
        keys, starts, parts, few, at = [], {}, [], [], 0
        self.holding: dict[tuple[int, int], int] = {}  # machines that hold a group of TP devices of a kind
        chunks: dict[int, Ints] = {}
        for k, kind in enumerate(pools.kinds):
            for tp in tp_degrees(problem, caps.train_max_tp):
                chunks.setdefault(tp, pools.chunks(tp))
                most = min(int(chunks[tp][k].sum()), samples)
                if most < 1:
                    continue
                table = tables.setdefault((kind, tp), Table(columns, kind, tp)).upto(most)[:, : most + 1]
                parts.append(table)
                few.append(pools.fewest(k, tp, most))
                self.holding[k, tp] = sum(n >= tp for at in pools.machines[k] for n in at)
                starts[k, tp] = at
                at += most + 1
                keys += [(k, tp, pp) for pp in range(1, min(caps.train_max_pp, model.layers) + 1)]
        self.keys = tuple(keys)
        columns_ = np.array(keys, dtype=np.int64).reshape(-1, 3).T
        self.kind, self.tp, self.pp = columns_
        self.start = np.array([starts[k, tp] for k, tp, _ in keys], dtype=np.int64)
        self.values = np.concatenate(parts, axis=1) if parts else np.zeros((len(FIELDS), 1))
        self.fewest = np.concatenate(few) if few else np.zeros(1, dtype=np.int64)
        depths = {
            pp: split_layers(model.layers, [1.0] * pp, columns.head_layers) or (0,) for pp in set(self.pp.tolist())
        }
        splits = [depths[pp] for pp in self.pp.tolist()]
        self.most_layers = np.array([max(s) for s in splits], dtype=np.int64)
        self.least_layers = np.array([min(s) for s in splits], dtype=np.int64)
        self.last_layers = np.array([s[-1] for s in splits], dtype=np.int64)
        self._networks(columns)
        self._capacity(chunks)

    def _networks(self, columns: Columns) -> None:
        """Seconds of moving one layer's states or the batch's activations, by lane."""
        cost, pools = self.cost, self.pools
        ctx, a = cost.context, cost.context.a
        kinds = [ctx.kind(k) for k in pools.kinds]
        self.layer_bytes = cost.problem.model.layer_params * cost.problem.model.dtype_bytes
        local = np.array([local_link(ctx.cluster, k).bytes_per_s * a.link_efficiency for k in kinds])
        self.local_s = self.layer_bytes / (self.tp * local[self.kind])
        near = [ctx.cluster.same_kind.bulk(), *pools.region_links]
        borders = [crossing_s(ctx, best_of((local_link(ctx.cluster, k), *near)), share=1.0) for k in kinds]
        self.border_s = np.array(borders)[self.kind]
        moved = 2 * cost.problem.model.layer_params * state_bytes_per_param(cost.problem.model)
        self.update_s = moved / (self.tp * np.array([hbm_rate(ctx, k) for k in kinds])[self.kind])

    def _capacity(self, chunks: dict[int, Ints]) -> None:
        """[s, n] the highest degree in each set of sites, and the most chunks of one stage inside one site."""
        pools, caps = self.pools, self.cost.problem.capabilities
        by_lane = np.array([chunks[tp][k] for k, tp, _ in self.keys]).reshape(len(self.keys), len(pools.sites))
        free = pools.inside - pools.rolling_inside
        most = pools.member.astype(np.int64) @ by_lane.T // self.pp
        most = np.minimum(most, free[:, self.kind] // (self.tp * self.pp))
        most = np.minimum(most, self.cost.problem.workload.samples_per_step)
        if caps.train_max_devices is not None:
            most = np.minimum(most, caps.train_max_devices // (self.tp * self.pp))
        most[:, self.pp > self.cost.problem.model.layers] = 0
        self.highest = most
        self.one_site = by_lane.max(axis=1, initial=0)
        self.in_site = by_lane  # [n, r]

    @functools.cached_property
    def _reach(self) -> list[tuple[Ints, Floats]]:
        """By lane: chunks that sites with links of at least some speed hold, and that speed, fastest first."""
        pools, found = self.pools, []
        sets = [s for s in np.argsort([-(x.bytes_per_s if x else np.inf) for x in pools.narrow]) if pools.size[s] > 1]
        speed = np.array([link.bytes_per_s for s in sets if (link := pools.narrow[s]) is not None])
        for held in self.in_site:
            found.append((np.maximum.accumulate(pools.member[sets].astype(np.int64) @ held), speed))
        return found

    def widest(self, lane: int, dp: int) -> Link:
        """The slowest link of a stage that no single site holds is no faster than this."""
        held, speed = self._reach[lane]
        at = int(np.searchsorted(held, dp))
        latency = min(x.latency_s for x in self.pools.links.values())
        return Link(latency_s=latency, bytes_per_s=float(speed[min(at, len(speed) - 1)]))

    def of(self, lane: Ints, dp: Ints) -> Floats:
        """[field, c] the tables at some degrees."""
        found: Floats = self.values[:, self.start[lane] + dp]
        return found

    def machines(self, lane: Ints, dp: Ints) -> Ints:
        """The fewest machines of one stage."""
        found: Ints = self.fewest[self.start[lane] + dp]
        return found

    def block(self, lane: int, dp: int) -> BlockShape:
        """The block of a lane at one degree."""
        k, tp, pp = self.keys[lane]
        return BlockShape(kind=self.pools.kinds[k], tp=tp, dp=dp, pp=pp)


def rounds_at_most(samples: int, low_dp: Ints) -> Floats:
    """Micro-batches of a step, at most: one sequence each."""
    found: Floats = np.maximum(1.0, np.ceil(samples / low_dp))
    return found


def ring_at_least_s(
    machines: Ints, low_dp: Ints, *, inside_s: Floats, between_s: Floats, latency_s: Floats, passes: int
) -> Floats:
    """One stage's collective over at least `low_dp` ranks on at least `machines`: `inside_s` and `between_s` are the seconds
    of its bytes over the link inside a machine and over the one between machines."""
    together = passes * inside_s * (1 - 1 / low_dp)
    apart = passes * (between_s * (1 - 1 / np.maximum(machines, 2)) + (np.maximum(machines, 2) - 1) * latency_s)
    found: Floats = np.where(machines > 1, apart, np.minimum(together, apart))
    found[low_dp <= 1] = 0.0
    return found
