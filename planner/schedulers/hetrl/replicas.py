"""The candidates of `hetrl-ilp` for generation: a replica shape on pools, the link its weights come over, what it lies beside."""

import itertools
from collections.abc import Iterator, Sequence

from planner.cluster import Link
from planner.cost.decode import ReplicaShape
from planner.cost.memory import replica_resident_bytes
from planner.cost.network import Place, best_of
from planner.cost.step import Offer
from planner.record import record
from planner.schedulers.hetrl.columns import Candidate, Candidates, Slot

_LEVELS = 4


@record
class ReplicaCandidate:
    """A replica whose TP groups lie in pools `at`, weights coming over `link`, beside at most `held_bytes` a device."""

    shape: ReplicaShape
    at: tuple[int, ...]
    link: Link
    held_bytes: float
    needs_bytes: float  # resident on each device
    offers: tuple[Offer, ...]
    most: int  # replicas that the pools can hold

    def fits(self, slot: Slot) -> bool:
        """Whether it may take a device like that."""
        return slot.held_bytes <= self.held_bytes and self.needs_bytes <= slot.takes_bytes


def actor_places(candidates: Candidates, c: Candidate) -> tuple[Place, ...]:
    """Where a group lies."""
    ix = dict.fromkeys(i for s in c.layout.stages for i in s.chunks)
    return tuple(candidates.classes[i].place for i in ix)


def links_to(candidates: Candidates, at: Sequence[int]) -> dict[Link, list[int]]:
    """The paths over which weights may reach pools `at`, as good as replicas elsewhere can make them, each with the candidates
    that train the actor at its other end."""
    every = [c.place for c in candidates.classes]
    target = tuple(candidates.classes[i].place for p in at for i in candidates.pools[p])
    known: dict[tuple[Place, ...], Link] = {}
    out: dict[Link, list[int]] = {}
    for n, c in enumerate(candidates.found):
        if "actor_training" in c.layout.tasks:
            places = actor_places(candidates, c)
            if places not in known:
                # A pool of several machines has some that the trainer is not on.
                apart = tuple(p for p in target if p.node not in {x.node for x in places})
                away = apart if len(target) > len(at) and apart and not candidates.shared else target
                links = candidates.cost.widest_links(places, every)
                known[places] = best_of(links[p] for p in away)
            out.setdefault(known[places], []).append(n)
    return out


def replica_candidates(candidates: Candidates) -> tuple[ReplicaCandidate, ...]:
    """All of them; of those that differ in what they lie beside only, the ones that offer something else."""
    return tuple(_every(candidates))


def _every(candidates: Candidates) -> Iterator[ReplicaCandidate]:
    room = [sum(candidates.classes[i].size for i in ix) for ix in candidates.pools]
    ctx = candidates.cost.context
    for kind, shapes in candidates.shapes.items():
        mine = [p for p, ix in enumerate(candidates.pools) if candidates.classes[ix[0]].place.kind == kind]
        for shape in shapes:
            largest = [max(candidates.classes[i].size for i in candidates.pools[p]) for p in mine]
            able = [p for p, n in zip(mine, largest, strict=True) if n >= shape.tp]
            for at in itertools.combinations_with_replacement(able, shape.pp):
                most = min(room[p] // (shape.tp * at.count(p)) for p in at)
                if most < 1:
                    continue
                needs = replica_resident_bytes(ctx, shape.tp, shape.pp)
                slots = [s for c in candidates.found for s, _, _ in c.slots if s.pool in at and needs <= s.takes_bytes]
                levels = sorted({0.0, *(s.held_bytes for s in slots)}, reverse=True)
                if not candidates.exact:  # the fullest devices, emptier ones in a few steps, and empty ones
                    levels = [*levels[:-1][:: max(1, len(levels) // _LEVELS)], levels[-1]]
                for link in links_to(candidates, at):
                    seen: set[tuple[Offer, ...]] = set()
                    for held in levels:
                        offers = candidates.cost.offers(shape, link, held)
                        if offers and offers not in seen:
                            seen.add(offers)
                            yield ReplicaCandidate(
                                shape=shape, at=at, link=link, held_bytes=held, needs_bytes=needs, offers=offers,
                                most=most,
                            )  # fmt: skip
