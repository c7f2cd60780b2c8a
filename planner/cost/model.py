"""`CostModel`: one problem's costs, remembered; every scheduler scores its plans here."""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from planner.calibration.records import Calibration
from planner.cluster import Link
from planner.cost.arrivals import Arrival, Stops, slowest_of, stops_of, weight_arrivals, widest_links
from planner.cost.assumptions import Assumptions
from planner.cost.context import context_of
from planner.cost.decode import Level, ReplicaShape, concurrency_grid, replica_level, sync_grid
from planner.cost.host import overfull
from planner.cost.memory import replica_resident_bytes, running_limit, tp_divides
from planner.cost.network import Place, best_link, spread_of
from planner.cost.ranks import MixedShape, RankShape, mixed_cost, mixed_shape, rank_imbalance
from planner.cost.routes import Hop
from planner.cost.step import Group, Offer, Rules, even_period, make_offer, rules_of, solve_period, window_needed_s
from planner.cost.traffic import linked_egress_usd
from planner.cost.training import StageShape, TaskWay, TrainerCost, TrainerShape, imbalance, train_cost
from planner.cost.update import swap_s, update_s
from planner.cost.waves import Curve, Wave, finished, makespan
from planner.plan import Placement, Plan, Prediction, Stage, Task
from planner.problem import Problem
from planner.record import record, replace
from planner.workflow import phi, side_tasks, tasks_of


@record
class Scored:
    """A plan with its rates and shares filled in, and what is predicted of it."""

    plan: Plan
    prediction: Prediction
    trainer: TrainerCost  # of the group that trains the actor
    sides: tuple[tuple[Placement, TrainerCost], ...] = ()  # of every group


class CostModel:
    """Costs of one problem. Pure: the same question gets the same answer; answers are remembered in the instance."""

    def __init__(
        self, problem: Problem, assumptions: Assumptions | None = None, calibration: Calibration | None = None
    ) -> None:
        """`calibration`: points measured on the user's own cards, preferred to the tables that come with the package; None:
        those of the problem, if it has any."""
        self.problem = problem
        self.context = context_of(problem, assumptions, calibration)
        self.moments = self.context.m
        self.rules: Rules = rules_of(problem.workload, self.moments, direct=self.context.direct)
        self.places = {d.id: Place(node=d.node, kind=d.kind, region=d.region) for d in problem.cluster.devices}
        self._levels: dict[tuple[ReplicaShape, int], Level] = {}
        self.side_tasks = side_tasks(problem.workload)
        self._limits: dict[tuple[ReplicaShape, float], int] = {}
        self._trainers: dict[TrainerShape | MixedShape, TrainerCost | None] = {}
        self._ways: dict[TrainerShape, dict[TaskWay, TrainerCost]] = {}
        self._skew: dict[int, float] = {}
        self._mixed_skew: dict[tuple[tuple[int, float], ...], float] = {}
        self._curves: dict[tuple[ReplicaShape, int], tuple[Level, Curve]] = {}
        self._offers: dict[tuple[ReplicaShape, Link, float], tuple[Offer, ...]] = {}
        self._trees: dict[Stops, tuple[tuple[Hop, ...], Mapping[Place, Arrival]]] = {}
        self._widest: dict[Stops, Mapping[Place, Link]] = {}

    @property
    def shares_devices(self) -> bool:
        """Whether replicas may run on devices that do other tasks too, taking turns."""
        return self.problem.capabilities.colocate and self.rules.sync

    def running_limit(self, shape: ReplicaShape, beside_bytes: float = 0.0) -> int:
        """Most samples a replica of that shape decodes at once beside what else its devices hold; 0 when it does not fit."""
        key = (shape, beside_bytes)
        if key not in self._limits:
            model = self.problem.model
            ok = tp_divides(model, shape.tp) and shape.pp <= model.layers
            self._limits[key] = running_limit(self.context, shape.kind, shape.tp, shape.pp, beside_bytes) if ok else 0
        return self._limits[key]

    def level(self, shape: ReplicaShape, running: int) -> Level:
        """Rate and generation time of a replica with `running` samples at once."""
        key = (shape, running)
        if key not in self._levels:
            self._levels[key] = replica_level(self.context, shape, running)
        return self._levels[key]

    def offers(self, shape: ReplicaShape, link: Link, beside_bytes: float = 0.0) -> tuple[Offer, ...]:
        """What a replica offers at each concurrency when weights reach it over `link`; empty when it does not fit.

        `beside_bytes`: held all the time on its fullest device by tasks that share it.
        """
        key = (shape, link, beside_bytes)
        if key not in self._offers:
            transfer = update_s(self.context, shape.kind, link)
            self._offers[key] = self._made(shape, transfer, self.running_limit(shape, beside_bytes))
        return self._offers[key]

    def _made(self, shape: ReplicaShape, transfer_s: float, limit: int) -> tuple[Offer, ...]:
        """The offers of a replica that runs at most `limit` samples."""
        if not self.rules.sync:
            return tuple(self._offer(shape, self.level(shape, b), transfer_s) for b in concurrency_grid(limit))
        return tuple(self._sync_offer(shape, transfer_s, b) for b in sync_grid(limit))

    def _offer(self, shape: ReplicaShape, level: Level, transfer_s: float, done: Curve = ()) -> Offer:
        swap = swap_s(self.context, shape.kind) if self.context.direct else 0.0
        return make_offer(level, transfer_s, swap, self.rules, done)

    def _sync_offer(self, shape: ReplicaShape, transfer_s: float, running: int) -> Offer:
        """What `running` samples at once come to in a step that waits for the last. Between powers of two a wave's seconds are
        taken to be linear, so that beside other tasks' models a replica never does more than alone."""
        key = (shape, running)
        if key not in self._curves:
            high = 1 << (running - 1).bit_length()
            low = high // 2
            tau = self.level(shape, high).tau_s
            fixed = max(0.0, 2 * self.level(shape, low).tau_s - tau) if low else tau
            each = (tau - fixed) / high
            tau = fixed + each * running
            mean = self.moments.response
            level = Level(
                running=running,
                rate_tokens_per_s=running * mean / tau,
                tau_s=tau,
                recompute_s=self.level(shape, high).recompute_s * running / high,
            )
            bends = makespan(self.problem.workload.response, self.problem.workload.samples_per_step)
            wave = Wave(running=running, least=low, tau_s=tau, fixed_s=fixed, tokens=mean)
            self._curves[key] = level, finished(wave, bends)
        level, curve = self._curves[key]
        return self._offer(shape, level, transfer_s, curve)

    def trainer(self, shape: TrainerShape | MixedShape) -> TrainerCost | None:
        """The cost of a group of tasks; None when it does not fit."""
        if not shape.tasks:
            shape = replace(shape, tasks=self.side_tasks)
        if shape not in self._trainers:
            p = self.problem
            if isinstance(shape, MixedShape):
                self._trainers[shape] = self._mixed(shape)
                return self._trainers[shape]
            models = [self.context.of(t).model for t in shape.tasks]
            ok = all(tp_divides(m, s.tp) for s in shape.stages for m in models)
            ok = ok and all(s.dp <= p.workload.samples_per_step for s in shape.stages)
            skew = [self.skew(s.dp) for s in shape.stages] if ok else []
            self._trainers[shape] = train_cost(self.context, shape, skew, self._ways_of(shape)) if ok else None
        return self._trainers[shape]

    def _ways_of(self, shape: TrainerShape) -> dict[TaskWay, TrainerCost]:
        """What ways to run tasks on those stages are known to take, whatever replicas hold there."""
        if any(s.beside_bytes for s in shape.stages):
            shape = replace(shape, stages=tuple(replace(s, beside_bytes=0.0) for s in shape.stages))
        return self._ways.setdefault(replace(shape, tasks=()), {})

    def _mixed(self, shape: MixedShape) -> TrainerCost | None:
        ok = all(tp_divides(self.context.of(t).model, shape.tp) for t in shape.tasks)
        if not ok or shape.dp > self.problem.workload.samples_per_step:
            return None
        key = tuple((r.dp, r.share) for r in shape.ranks)
        if key not in self._mixed_skew:
            self._mixed_skew[key] = rank_imbalance(self.context, shape.ranks)
        return mixed_cost(self.context, shape, self._mixed_skew[key])

    def skew(self, dp: int) -> float:
        """Tokens of the fullest DP worker over the mean."""
        if dp not in self._skew:
            self._skew[dp] = imbalance(self.context, dp)
        return self._skew[dp]

    def places_of(self, devices: Iterable[str]) -> tuple[Place, ...]:
        """The distinct places of some devices, in order."""
        return tuple(dict.fromkeys(self.places[d] for d in devices))

    def weight_tree(self, trainer: Iterable[Place], replicas: Iterable[Place]) -> tuple[Hop, ...]:
        """The hops by which new weights reach the stops of some replicas (`planner.cost.arrivals`)."""
        return self._tree(stops_of(trainer, replicas)[0])[0]

    def arrivals(self, trainer: Iterable[Place], replicas: Iterable[Place]) -> Mapping[Place, Arrival]:
        """The path of new weights to each place of the replicas of one plan."""
        stops, stands = stops_of(trainer, replicas)
        found = self._tree(stops)[1]
        return {p: found[stop] for p, stop in stands.items()}

    def _tree(self, stops: Stops) -> tuple[tuple[Hop, ...], Mapping[Place, Arrival]]:
        if stops not in self._trees:
            self._trees[stops] = weight_arrivals(self.problem.cluster, stops)
        return self._trees[stops]

    def widest_links(self, trainer: Iterable[Place], replicas: Iterable[Place]) -> Mapping[Place, Link]:
        """For each place a link as good as its path in any plan whose replicas are at some of these places."""
        stops, stands = stops_of(trainer, replicas)
        if stops not in self._widest:
            self._widest[stops] = widest_links(self.problem.cluster, stops)
        return {p: self._widest[stops][stop] for p, stop in stands.items()}

    def trainer_shape(
        self, placement: Placement, tasks: tuple[Task, ...] = (), beside_bytes: Mapping[str, float] | None = None
    ) -> TrainerShape | MixedShape:
        """The shape of a group that lies on real devices; `beside_bytes`: what replicas hold there, by device."""
        beside = beside_bytes or {}
        cluster = self.problem.cluster
        only = placement.stages[0]
        if len(placement.stages) == 1 and (
            only.token_shares or any(self.places[d].kind != only.kind for d in only.devices)
        ):
            return self._ranks(only, tasks or placement.tasks, beside)
        places = [self.places_of(s.devices) for s in placement.stages]
        stages = tuple(
            StageShape(
                kind=s.kind,
                dp=s.dp,
                tp=s.tp,
                layers=s.layers,
                spread=spread_of(cluster, p),
                beside_bytes=max((beside[d] for d in s.devices if d in beside), default=0.0),
            )
            for s, p in zip(placement.stages, places, strict=True)
        )
        links = tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places))
        return TrainerShape(stages=stages, links=links, tasks=tasks or placement.tasks)

    def _ranks(self, stage: Stage, tasks: tuple[Task, ...], beside: Mapping[str, float]) -> MixedShape:
        """The shape of a stage of unlike ranks: those of one kind and share together."""
        alike: dict[tuple[str, float], list[int]] = {}
        for i in range(stage.dp):
            share = stage.token_shares[i] if stage.token_shares else 1 / stage.dp
            alike.setdefault((self.places[stage.devices[i * stage.tp]].kind, share), []).append(i)
        held = [max(beside.get(d, 0.0) for d in stage.devices[i * stage.tp :][: stage.tp]) for i in range(stage.dp)]
        return mixed_shape(
            self.problem.cluster,
            [
                RankShape(kind=k, dp=len(ix), share=share, beside_bytes=max(held[i] for i in ix))
                for (k, share), ix in alike.items()
            ],
            [[self.places[stage.devices[i * stage.tp]] for i in ix] for ix in alike.values()],
            tp=stage.tp,
            layers=stage.layers,
            tasks=tasks,
        )

    def evaluate(self, plan: Plan) -> Scored | None:
        """Prediction of a plan that the judge accepts; None when a group of tasks, a replica or a machine's host
        memory does not hold it."""
        train = plan.train
        if train is None or not train.stages or not plan.rollouts:
            return None
        tasks = tasks_of(plan, self.problem.workload)
        sides = self._sides(plan, tasks)
        if sides is None or overfull(self.context, plan):
            return None
        groups = self._groups(plan.rollouts, self.places_of(train.devices), _residents(sides))
        if groups is None:
            return None
        train_s = side_s(c for _, c in sides)
        solved = (even_period if plan.even_shares else solve_period)(train_s, [g for g, _ in groups], self.rules)
        if solved is None:
            return None
        period_s, chosen = solved
        rolled = [(g, o, rs) for (g, rs), o in zip(groups, chosen, strict=True) if o is not None]
        return self._scored(plan, sides, rolled, period_s)

    def _sides(
        self, plan: Plan, tasks: Mapping[Placement, tuple[Task, ...]]
    ) -> tuple[tuple[Placement, TrainerCost], ...] | None:
        """Every group of tasks with its cost."""
        held = functools.cache(functools.partial(replica_resident_bytes, self.context))  # many replicas are alike
        beside = {d: held(r.tp, r.pp) for r in plan.rollouts for d in r.devices}
        out: list[tuple[Placement, TrainerCost]] = []
        for p in plan.sides:
            cost = self.trainer(self.trainer_shape(p, tasks[p], beside)) if tasks[p] and p.stages else None
            if cost is None:
                return None
            out.append((p if p.tasks else replace(p, tasks=tasks[p]), cost))
        return tuple(out)

    def _groups(
        self, rollouts: Sequence[Placement], trainer: tuple[Place, ...], resident: Mapping[str, float]
    ) -> list[tuple[Group, list[Placement]]] | None:
        """Replicas that offer the same, together."""
        found: dict[tuple[Offer, ...], list[Placement]] = {}
        at = [self.places_of(r.devices) for r in rollouts]
        arrivals = self.arrivals(trainer, dict.fromkeys(itertools.chain.from_iterable(at)))
        for r, places in zip(rollouts, at, strict=True):
            shape = ReplicaShape(kind=r.kind, tp=r.tp, pp=r.pp)
            link = slowest_of([arrivals[p] for p in places]).link
            beside = max((resident[d] for d in r.devices if d in resident), default=0.0)
            offers = self.offers(shape, link, beside)
            if r.max_running is not None and offers:
                if r.max_running > self.running_limit(shape, beside):
                    return None
                offers = self.capped(shape, offers[0].transfer_s, r.max_running)
            if not offers:
                return None
            found.setdefault(offers, []).append(r)
        return [(Group(offers=o, count=len(rs), mandatory=True), rs) for o, rs in found.items()]

    def capped(self, shape: ReplicaShape, transfer_s: float, running: int) -> tuple[Offer, ...]:
        """The offers of a replica whose plan says how many samples it runs; at the end of a sync rollout, fewer."""
        if self.rules.sync:
            return self._made(shape, transfer_s, running)
        return (self._offer(shape, self.level(shape, running), transfer_s),)

    def _scored(
        self,
        plan: Plan,
        sides: tuple[tuple[Placement, TrainerCost], ...],
        rolled: list[tuple[Group, Offer, list[Placement]]],
        period_s: float,
    ) -> Scored:
        rules, train_s = self.rules, side_s(c for _, c in sides)
        running: list[tuple[Offer, int]] = []
        given: dict[str, tuple[Offer, float]] = {}
        total = 0.0
        for group, offer, replicas in rolled:
            running.append((offer, group.count))
            tokens = 1.0 if plan.even_shares else rules.given_tokens(offer, period_s, train_s)
            total += tokens * group.count
            for r in replicas:
                given[r.devices[0]] = (offer, tokens)
        middle_s = statistics.median(o.level.tau_s for o, _ in given.values())
        placements = [replace(p, rate_tokens_per_s=rules.work_tokens / cost.train_s) for p, cost in sides]
        for p in plan.rollouts:
            offer, tokens = given[p.devices[0]]
            placements.append(
                replace(
                    p,
                    max_running=offer.level.running,
                    rate_tokens_per_s=offer.level.rate_tokens_per_s,
                    share=tokens / total if total > 0 else 0.0,
                    strong=offer.level.tau_s <= middle_s * (1 + 1e-9),
                )
            )
        actor = next(cost for p, cost in sides if "actor_training" in p.tasks)
        filled = replace(plan, placements=tuple(placements))
        prediction = self._prediction(filled, running, period_s, sides)
        return Scored(plan=filled, prediction=prediction, trainer=actor, sides=sides)

    def _prediction(
        self,
        plan: Plan,
        running: Sequence[tuple[Offer, int]],
        period_s: float,
        sides: Sequence[tuple[Placement, TrainerCost]],
    ) -> Prediction:
        train_s, rollout_s = side_s(c for _, c in sides), window_needed_s(running, self.rules)
        usd, egress_usd = self.usd_per_h(plan), linked_egress_usd(self.problem, plan)
        work = self.rules.work_tokens
        return Prediction(
            step_s=period_s,
            train_s=train_s,
            rollout_s=rollout_s,
            update_s=max(o.transfer_s for o, _ in running),
            tokens_per_s=work / period_s,
            usd_per_h=usd,
            usd_per_mtok=None if usd is None else (usd / 3600 * period_s + egress_usd) / work * 1e6,
            egress_usd_per_step=egress_usd,
            staleness_mean=self._staleness(running, train_s, rollout_s),
            score_s=phi(c.score_s for _, c in sides),
            checkpoint_s=max(self.context.kind(self.places[d].kind).checkpoint_s for p, _ in sides for d in p.devices),
        )

    def _staleness(self, running: Sequence[tuple[Offer, int]], train_s: float, rollout_s: float) -> float:
        """Mean age of trained tokens in steps: C M_tail / B + rho while rollout is the slower side, else the bound."""
        if self.rules.sync:
            return 0.0
        eta = float(self.rules.eta)
        if rollout_s <= train_s:
            return eta
        concurrent = sum(o.level.running * n for o, n in running)
        samples = self.problem.workload.samples_per_step
        return min(eta, concurrent * self.moments.tail_group / samples + train_s / rollout_s)

    def usd_per_h(self, plan: Plan) -> float | None:
        """Price of every machine the plan uses, idle devices of it included; None when a price is not known."""
        nodes = {self.places[d].node for p in plan.placements for d in p.devices}
        prices = [
            self.problem.cluster.kinds[d.kind].price_usd_per_h for d in self.problem.cluster.devices if d.node in nodes
        ]
        known = [p for p in prices if p is not None]
        return math.fsum(known) if len(known) == len(prices) else None


def side_s(costs: Iterable[TrainerCost]) -> float:
    """C_T: seconds of all tasks but generation. Scoring comes first, then training; groups run at once."""
    known = tuple(costs)
    return phi(c.score_s for c in known) + phi(c.train_s - c.score_s for c in known)


def _residents(sides: Sequence[tuple[Placement, TrainerCost]]) -> dict[str, float]:
    """What the groups' models hold all the time, by device (bytes)."""
    return {
        d: held for p, cost in sides for s, held in zip(p.stages, cost.resident_bytes, strict=True) for d in s.devices
    }
