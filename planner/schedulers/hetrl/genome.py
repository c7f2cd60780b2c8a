"""An individual of the evolutionary search: levels 3 to 5 of one arm, on device classes.

Level 3 is the devices of each class that a group has, level 4 the rank of its parallel layout and the shapes of replicas,
level 5 the class that each TP group (tasklet) lies in. Devices that no group has are generation's.
"""

import random
from collections.abc import Sequence

from planner.cost.decode import ReplicaShape
from planner.plan import Task
from planner.record import record, replace
from planner.schedulers.hetrl.layout import GroupLayout, Seat, SeatedReplica, role_of
from planner.schedulers.hetrl.ways import Chunks, Ways
from planner.space import DeviceClass

_IDLE = 0.15  # of the draws leave a kind out of generation


@record
class Team:
    """A group of tasks: its devices by class, the rank of its layout, its tasklets."""

    tasks: tuple[Task, ...]
    counts: tuple[int, ...]
    way: int
    chunks: Chunks


@record
class Packing:
    """Replicas on one class: at most `limit` of the shape of that rank (0: no limit), smaller ones on what is left; rank -1
    leaves the class idle."""

    rank: int
    limit: int = 0


@record
class Genome:
    """All groups but generation, the packing of replicas by class, and the groups that generation shares devices with."""

    teams: tuple[Team, ...]
    packings: tuple[Packing, ...]
    shared: tuple[int, ...] = ()


class Breeder:
    """Makes genomes that keep devices partitioned and overrides respected. All chance comes from one generator."""

    def __init__(self, ways: Ways, shapes: dict[str, tuple[ReplicaShape, ...]], rng: random.Random) -> None:
        self.ways, self.shapes, self.rng = ways, shapes, rng
        self.classes: Sequence[DeviceClass] = ways.classes

    def own(self, genome: Genome) -> list[int]:
        """Devices by class that generation has for itself."""
        return [c.size - sum(t.counts[i] for t in genome.teams) for i, c in enumerate(self.classes)]

    def legal(self, genome: Genome) -> bool:
        """Whether devices are partitioned, pins kept and no group spans more kinds than it may."""
        caps = self.ways.cost.problem.capabilities
        for i, c in enumerate(self.classes):
            taken = [t.counts[i] for t in genome.teams]
            trained = sum(t.counts[i] for t in genome.teams if role_of(t.tasks) == "train")
            if min(taken) < 0 or sum(taken) > c.size - len(c.must_roll) or trained < len(c.must_train):
                return False
        for t in genome.teams:
            kinds = {c.place.kind for c, n in zip(self.classes, t.counts, strict=True) if n}
            if not kinds or len(kinds) > min(2, caps.train_max_kinds):
                return False
            if caps.train_max_devices is not None and sum(t.counts) > caps.train_max_devices:
                return False
        return any(self.own(genome)) or bool(genome.shared)

    def team(self, tasks: tuple[Task, ...], counts: tuple[int, ...], way: int, order: Sequence[int]) -> Team | None:
        """A group on those devices with the layout of that rank, tasklets in the order of classes given."""
        blocks = self.ways.of(tasks, counts)
        if not blocks:
            return None
        way %= len(blocks)
        chunks = self.ways.chunks(blocks[way], counts, order)
        return None if chunks is None else Team(tasks=tasks, counts=counts, way=way, chunks=chunks)

    def random(
        self, groups: Sequence[tuple[Task, ...]], sizes: Sequence[int], shared: tuple[int, ...]
    ) -> Genome | None:
        """Random level 3 and 5, the best layout of level 4. The classes of a kind follow each other, so that a group lies
        on few kinds and machines; None when the draw breaks a rule."""
        left = [c.size - len(c.must_roll) for c in self.classes]
        pins = [len(c.must_train) for c in self.classes]
        counts = [[0] * len(left) for _ in groups]
        trainers = [g for g, tasks in enumerate(groups) if role_of(tasks) == "train"]
        for i, n in enumerate(pins):
            g = self.rng.choice(trainers)
            counts[g][i] += n
            left[i] -= n
        for g in self.rng.sample(range(len(groups)), len(groups)):
            for i in self._order():
                n = min(left[i], sizes[g] - sum(counts[g]))
                if n > 0:
                    counts[g][i] += n
                    left[i] -= n
        if any(sum(c) != n for c, n in zip(counts, sizes, strict=True)):
            return None
        order = self._order()
        teams = [self.team(t, tuple(c), 0, order) for t, c in zip(groups, counts, strict=True)]
        if any(t is None for t in teams):
            return None
        made = Genome(
            teams=tuple(t for t in teams if t is not None),
            packings=self._packings(),
            shared=shared,
        )
        return made if self.legal(made) else None

    def _order(self) -> list[int]:
        """The classes, kinds in random order and machines of a kind in random order."""
        kinds = list(dict.fromkeys(c.place.kind for c in self.classes))
        self.rng.shuffle(kinds)
        out: list[int] = []
        for k in kinds:
            mine = [i for i, c in enumerate(self.classes) if c.place.kind == k]
            self.rng.shuffle(mine)
            out += mine
        return out

    def _packings(self) -> tuple[Packing, ...]:
        """One random shape for each kind; now and then none."""
        rank = {
            k: self.rng.randrange(len(s)) if s and self.rng.random() >= _IDLE else -1 for k, s in self.shapes.items()
        }
        return tuple(Packing(rank=rank[c.place.kind]) for c in self.classes)

    def mutated(self, genome: Genome) -> Genome:
        """Another layout of a group (level 4), or another packing of a class or of all classes of a kind."""
        if self.rng.random() < 0.4:
            g = self.rng.randrange(len(genome.teams))
            t = genome.teams[g]
            made = self.team(
                t.tasks, t.counts, self.rng.randrange(max(1, len(self.ways.of(t.tasks, t.counts)))), self._order()
            )
            return genome if made is None else self._with(genome, g, made)
        i = self.rng.randrange(len(self.classes))
        kind = self.classes[i].place.kind
        ranks = len(self.shapes[kind])
        rank = self.rng.randrange(-1, ranks)
        new = Packing(rank=rank, limit=self.rng.choice((0, 0, 0, 1, 2)))
        whole = self.rng.random() < 0.5
        return replace(
            genome,
            packings=tuple(
                new if j == i or (whole and c.place.kind == kind) else old
                for j, (c, old) in enumerate(zip(self.classes, genome.packings, strict=True))
            ),
        )

    def swapped_gpus(self, genome: Genome) -> Genome:
        """Level 3: two groups, or a group and generation, exchange equally many devices of two classes. The genome itself
        where the draw breaks a rule."""
        g = self.rng.randrange(len(genome.teams))
        h = self.rng.choice([-1, *(k for k in range(len(genome.teams)) if k != g)])
        theirs = genome.teams[h].counts if h >= 0 else tuple(self.own(genome))
        mine = genome.teams[g].counts
        give = [i for i, n in enumerate(mine) if n]
        take = [i for i, n in enumerate(theirs) if n]
        if not give or not take:
            return genome
        a, b = self.rng.choice(give), self.rng.choice(take)
        n = self.rng.choice((1, min(mine[a], theirs[b])))
        if a == b:
            return genome
        moved = self._resized(genome, g, {a: -n, b: n})
        if moved is not None and h >= 0:
            moved = self._resized(moved, h, {a: n, b: -n})
        return moved if moved is not None and self.legal(moved) else genome

    def swapped_tasklets(self, genome: Genome) -> Genome:
        """Level 5: two TP groups of a block change places."""
        g = self.rng.randrange(len(genome.teams))
        t = genome.teams[g]
        b = self.rng.randrange(len(t.chunks))
        chunks = list(t.chunks[b])
        x, y = self.rng.randrange(len(chunks)), self.rng.randrange(len(chunks))
        chunks[x], chunks[y] = chunks[y], chunks[x]
        return self._with(genome, g, replace(t, chunks=(*t.chunks[:b], tuple(chunks), *t.chunks[b + 1 :])))

    def regrown(self, genome: Genome, unit: int) -> Genome:
        """Level 2, refined: a group gets up to `unit` devices of one class from generation or gives as many."""
        g = self.rng.randrange(len(genome.teams))
        own, mine = self.own(genome), genome.teams[g].counts
        if self.rng.random() < 0.5:
            some = [i for i, n in enumerate(own) if n]
            sign = 1
        else:
            some = [i for i, n in enumerate(mine) if n]
            sign = -1
        if not some:
            return genome
        i = self.rng.choice(some)
        n = min(unit, own[i] if sign > 0 else mine[i])
        made = self._resized(genome, g, {i: sign * n})
        return made if made is not None and self.legal(made) else genome

    def _resized(self, genome: Genome, g: int, by: dict[int, int]) -> Genome | None:
        t = genome.teams[g]
        counts = tuple(n + by.get(i, 0) for i, n in enumerate(t.counts))
        if min(counts) < 0 or not any(counts):
            return None
        made = self.team(t.tasks, counts, 0, self._order())
        return None if made is None else self._with(genome, g, made)

    def _with(self, genome: Genome, g: int, team: Team) -> Genome:
        return replace(genome, teams=(*genome.teams[:g], team, *genome.teams[g + 1 :]))

    def layouts(self, genome: Genome) -> tuple[GroupLayout, ...] | None:
        """The groups on classes."""
        out: list[GroupLayout] = []
        for t in genome.teams:
            blocks = self.ways.of(t.tasks, t.counts)[t.way]
            made = self.ways.lay_out(t.tasks, blocks, t.chunks)
            if made is None:
                return None
            out.append(made)
        return tuple(out)

    def replicas(self, genome: Genome, groups: Sequence[GroupLayout]) -> list[SeatedReplica]:
        """Replicas packed on the devices generation has or shares, class by class."""
        seats = self._seats(genome, groups)
        out: list[SeatedReplica] = []
        for kind, shapes in self.shapes.items():
            mine = [i for i, c in enumerate(self.classes) if c.place.kind == kind]
            if shapes and shapes[0].pp > 1:
                out += _pipelines(shapes, [(genome.packings[i], seats[i]) for i in mine])
                continue
            for i in mine:
                out += _packed(shapes, genome.packings[i], seats[i], len(self.classes[i].must_roll))
        return out

    def _seats(self, genome: Genome, groups: Sequence[GroupLayout]) -> list[list[Seat]]:
        used = [sum(ns) for ns in zip(*(g.used(len(self.classes)) for g in groups), strict=True)]
        seats = [[Seat(at=i)] * (c.size - used[i]) for i, c in enumerate(self.classes)]
        for g in genome.shared:
            for k, s in enumerate(groups[g].stages):
                for i in s.chunks:
                    seats[i] += [Seat(at=i, group=g, stage=k)] * s.tp
        return seats


def _packed(shapes: Sequence[ReplicaShape], packing: Packing, seats: list[Seat], must: int) -> list[SeatedReplica]:
    if packing.rank < 0 or not shapes:
        seats = seats[:must]  # devices pinned to rollout come first among generation's own
    first = shapes[max(0, packing.rank)] if shapes else None
    out: list[SeatedReplica] = []
    if first is None:
        return out
    limit = packing.limit or len(seats)
    for shape in (first, *sorted((s for s in shapes if s.tp < first.tp), key=lambda s: -s.tp)):
        while len(seats) >= shape.tp and (shape is not first or len(out) < limit):
            out.append(SeatedReplica(shape=shape, seats=tuple(seats[: shape.tp])))
            seats = seats[shape.tp :]
    if packing.limit and not any(s.tp < first.tp for s in shapes):
        for other in (s for s in shapes if s.tp > first.tp):
            while len(seats) >= other.tp:
                out.append(SeatedReplica(shape=other, seats=tuple(seats[: other.tp])))
                seats = seats[other.tp :]
    return out


def _pipelines(shapes: Sequence[ReplicaShape], classes: Sequence[tuple[Packing, list[Seat]]]) -> list[SeatedReplica]:
    """Replicas over machines, of the shape that the first class in use prefers."""
    rank = next((p.rank for p, seats in classes if p.rank >= 0 and seats), -1)
    if rank < 0:
        return []
    shape = shapes[rank]
    chunks = [
        tuple(seats[k * shape.tp : (k + 1) * shape.tp]) for _, seats in classes for k in range(len(seats) // shape.tp)
    ]
    return [
        SeatedReplica(shape=shape, seats=tuple(s for c in chunks[r * shape.pp : (r + 1) * shape.pp] for s in c))
        for r in range(len(chunks) // shape.pp)
    ]
