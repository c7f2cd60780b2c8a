"""From placements to speeds and paths, all by the planner's cost model of one problem."""

from collections.abc import Collection

from planner.cluster import Link
from planner.cost.arrivals import Arrival, slowest_of
from planner.cost.decode import ReplicaShape
from planner.cost.model import CostModel
from planner.cost.network import Place
from planner.cost.update import swap_s, update_bytes, update_s
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import replace
from planner.workload import Lengths
from runtime.policy.staleness import StalenessPolicy, StalePolicy
from runtime.sim.lengths import LengthModel, from_workload
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed, replica_speed, trainer_speed

_NO_LIMIT = 1e30  # bytes/s


class Physics:
    """Speeds of the placements of one cluster. Tables are made once a shape."""

    def __init__(self, problem: Problem, tables: dict[tuple[ReplicaShape, int], ReplicaSpeed] | None = None) -> None:
        self.problem = problem
        self.cost = CostModel(problem)
        self._routed: tuple[Plan, dict[tuple[str, ...], WeightsPath]] | None = None
        self.tables = {} if tables is None else tables  # may be shared by problems that differ in their devices only

    def replica(self, p: Placement) -> ReplicaSpeed:
        """How fast a replica decodes, up to the samples its plan lets it run at once."""
        shape = ReplicaShape(kind=p.kind, tp=p.tp, pp=p.pp)
        slots = p.max_running or max(1, self.cost.running_limit(shape))
        if (shape, slots) not in self.tables:
            self.tables[shape, slots] = replica_speed(self.cost.context, shape, slots)
        return self.tables[shape, slots]

    def trainer(self, plan: Plan) -> TrainerSpeed | None:
        """How fast everything but generation is; None where it does not fit."""
        scored = self.cost.evaluate(plan)
        return None if scored is None else trainer_speed(self.cost.context, scored.prediction.train_s)

    def path(self, p: Placement, plan: Plan) -> WeightsPath:
        """How new weights get to a replica of a plan."""
        if self._routed is None or self._routed[0] is not plan:
            self._routed = plan, self._paths(plan)
        return self._routed[1][p.devices]

    def _paths(self, plan: Plan) -> dict[tuple[str, ...], WeightsPath]:
        """By the replicas' devices, along the tree that the cost model times. Relays pass on what they receive, so a path is
        a stream over its slowest hop; replicas behind one such hop wait for one stream."""
        assert plan.train is not None
        at = {p.devices: (p.kind, self.cost.places_of(p.devices)) for p in plan.rollouts}
        trainer = self.cost.places_of(plan.train.devices)
        arrivals = self.cost.arrivals(trainer, dict.fromkeys(x for _, places in at.values() for x in places))
        found = {}
        for devices, (kind, places) in at.items():
            last = slowest_of([arrivals[x] for x in places])
            place = next(x for x in places if arrivals[x] == last)
            found[devices] = self._over(kind, last, _link_name(last, place, trainer))
        return found

    def _over(self, kind: str, arrival: Arrival, name: str) -> WeightsPath:
        ctx, link = self.cost.context, arrival.link
        fixed_s = update_s(ctx, kind, Link(latency_s=link.latency_s, bytes_per_s=_NO_LIMIT))
        stops_s = swap_s(ctx, kind) if ctx.direct and self.cost.rules.overlapped else 0.0
        size = update_bytes(ctx.model, ctx.weights_full_every, ctx.a)
        moving_s = update_s(ctx, kind, link) - fixed_s
        return WeightsPath(
            link=name,
            bytes_per_s=size / moving_s if moving_s > 0 else _NO_LIMIT,
            size_bytes=size,
            fixed_s=fixed_s - stops_s,
            swap_s=stops_s,
        )


def _link_name(arrival: Arrival, place: Place, trainer: Collection[Place]) -> str:
    """The slowest hop to a place: a link between two regions, a machine's own, or the way into a machine."""
    hop = arrival.over
    if hop.crosses:
        return f"{hop.source.region} to {hop.target.region}"
    return f"inside {place.node}" if place.node in {p.node for p in trainer} else f"into {place.node}"


def flow_rules(
    problem: Problem,
    *,
    stale: StalePolicy = "mask",
    prompt: LengthModel | None = None,
    response: LengthModel | None = None,
    windows: int = 8,
    steps: int | None = None,
) -> FlowRules:
    """The rules of a problem's workload. Lengths default to what the planner assumes."""
    w = problem.workload
    sync = w.synchronous
    return FlowRules(
        policy=StalenessPolicy(eta=0 if sync else w.eta, prompts_per_step=w.prompts_per_step, stale=stale),
        responses_per_prompt=w.responses_per_prompt,
        prompt=prompt or from_workload(w.prompt),
        response=response or from_workload(w.response),
        reward_s=w.reward_s_per_sample,
        pause_all=w.update_mode == "pause" and not sync,
        overlapped=w.overlapped_updates or (problem.capabilities.direct_updates and not sync),
        recompute=w.kv_on_update == "recompute" and not sync,
        block=problem.capabilities.rollout_prefix_block if w.responses_per_prompt > 1 else None,
        windows=windows,
        steps=steps,
    )


def with_lengths(problem: Problem, response: LengthModel, step: int = 0) -> Problem:
    """The problem as a planner that has measured these answers would put it."""
    mean = min(response.mean_tokens * response.factor(step), float(response.max_tokens))
    lengths = Lengths(mean_tokens=mean, cv=response.spread, max_tokens=response.max_tokens)
    return replace(problem, workload=replace(problem.workload, response=lengths))
