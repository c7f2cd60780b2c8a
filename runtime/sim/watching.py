"""What the simulated units have done, measured as the runtime measures its own, and the devices found slow by it.

Replicas tell decode seconds, steps and tokens. A rank of the trainer is taken to be timed by itself, without its waits for
the others: an assumption, since the runtime's trainer tells one figure for all its devices.
"""

import math
from collections.abc import Mapping

from planner.plan import Placement, Plan, Prediction
from planner.problem import Problem
from planner.record import replace
from runtime.core.calibrating import Calibrating, Estimate, Modelled, calibrate, drift_of, kind_estimates
from runtime.core.event import UnitRole
from runtime.core.modelled import CostedWork
from runtime.core.observation import Observation, ReplicaSeen, TrainerSeen, Work
from runtime.core.state import ClusterState, DeviceBelief
from runtime.policy.drift import DeviceDrift, DriftRule, watched
from runtime.sim.figures import StepSeen
from runtime.sim.flow import SimulatedFlow

MATERIAL = 0.05  # a change of a slow device's speed below that is no reason for another plan


class _Costed:
    """Implements `Model` of the calibration: replicas as the daemon's model has them, ranks by the plan's prediction."""

    def __init__(self, problem: Problem, plan: Plan, prediction: Prediction) -> None:
        self._decode = CostedWork(problem, plan).decode
        w = problem.workload
        self._token_s = prediction.train_s / (w.samples_per_step * w.response.mean_tokens)

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        """A replica's block."""
        return self._decode(kind, devices, work)

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        """A rank's block; tokens are those of responses."""
        return Modelled(seconds=work.tokens * self._token_s, tokens_per_s=1 / self._token_s)


class Watch:
    """Looks at step boundaries. `speeds`: shares of the modelled speed of the devices that are slow."""

    def __init__(self, problem: Problem, rule: DriftRule) -> None:
        self.rule = rule
        self.speeds: dict[str, float] = {}
        self._problem = problem
        self._kinds = {d.id: d.kind for d in problem.cluster.devices}
        beliefs = {
            d.id: DeviceBelief(id=d.id, kind=d.kind, node=d.node, index=d.index, region=d.region)
            for d in problem.cluster.devices
        }
        self._state = ClusterState(devices=beliefs)
        self._calibrating = Calibrating()
        self._drifts: dict[str, DeviceDrift] = {}
        self._ranks: dict[str, Work] = {}
        self._model: tuple[Plan, _Costed] | None = None

    def plan_in_force(self, plan: Plan, prediction: Prediction) -> None:
        """Measure against this plan from now on."""
        self._model = plan, _Costed(self._problem, plan, prediction)

    def step_ended(self, step: StepSeen, train: Placement, slow: Mapping[str, float]) -> None:
        """A step of that trainer, whose devices take `slow` times as long as they should: the slowest makes it last."""
        most = max(slow.get(d, 1.0) for d in train.devices)
        tokens = step.trained_tokens + step.masked_tokens
        ranks = {}
        for d in train.devices:
            before = self._ranks.get(d, Work())
            own_s = (step.ended_s - step.began_s) * slow.get(d, 1.0) / most
            ranks[d] = Work(busy_s=before.busy_s + own_s, steps=before.steps + 1, tokens=before.tokens + tokens)
        self._ranks = ranks

    def look(self, flow: SimulatedFlow, placed: Mapping[str, Placement]) -> str:
        """Measure and judge; answers with why a plan is needed, "" when none is."""
        if self._model is None:
            return ""
        now_s, model = flow.now_s, self._model[1]
        seen = Observation(
            at_s=now_s,
            devices=(),
            replicas=tuple(_replica(flow, name, p) for name, p in placed.items() if name in flow.numbers),
            trainers=tuple(_rank(d, work) for d, work in self._ranks.items()),
            flow=None,
            flow_age_s=None,
        )
        events, self._calibrating = calibrate(seen, self._state, self._calibrating, lambda: model, now_s)
        factors = {**self._state.calibration, **{(e.kind, e.role): e.factor for e in events}}
        self._state = replace(self._state, calibration=factors)
        role: dict[str, UnitRole] = {d: "rollout" for p in placed.values() for d in p.devices}
        role |= dict.fromkeys(self._ranks, "train")
        now = {k: e for k, e in self._calibrating.estimates.items() if role.get(k[0]) == k[1]}
        shares: dict[str, float] = {}
        for alike in kind_estimates(now, self._kinds).values():
            shares |= self._shares(alike)
        self._drifts = watched(self._drifts, shares, self.rule, now_s)
        return self._reason({d: e for (d, _), e in now.items() if e.counts})

    def _shares(self, alike: Mapping[str, Estimate]) -> dict[str, float]:
        """Drift factors of devices of one kind at the same work against those that are not slow: a few slow ones that come
        together must not pass for fast. A slow one without such peers is held against the model."""
        slow = {d for d, x in self._drifts.items() if x.slow}
        out: dict[str, float] = {}
        for device, estimate in alike.items():
            drift = drift_of(device, {d: e for d, e in alike.items() if d == device or d not in slow})
            if drift is None and device in slow:
                drift = math.exp(estimate.log_ratio)
            if drift is not None:
                out[device] = drift
        return out

    def _reason(self, estimates: Mapping[str, Estimate]) -> str:
        slow = {d for d, x in self._drifts.items() if x.slow}
        found = {
            d: min(1.0, math.exp(estimates[d].log_ratio)) if d in estimates else self.speeds.get(d, 1.0) for d in slow
        }
        changed = [d for d, s in found.items() if abs(s - self.speeds.get(d, 1.0)) > MATERIAL]
        again = self.speeds.keys() - slow
        if not changed and not again:
            return ""
        self.speeds = found
        words = [f"{', '.join(sorted(changed))} slow"] if changed else []
        return " and ".join([*words, *([f"{', '.join(sorted(again))} fast again"] if again else [])])


def _replica(flow: SimulatedFlow, name: str, p: Placement) -> ReplicaSeen:
    i, d = flow.numbers[name], flow.decoding
    work = Work(busy_s=float(d.spent[i, 0]), steps=int(d.v[i]), tokens=int(d.decoded[i]))
    return ReplicaSeen(
        id=name, epoch=1, devices=p.devices, phase="serving", version=int(d.version[i]), digest=None, running=int(d.n[i]),
        slots=d.lanes[i].speed.slots, tokens_per_s=None, kv_used_share=None, host_lag_share=None, pid=None, age_s=0.0, work=work,
    )  # fmt: skip


def _rank(device: str, work: Work) -> TrainerSeen:
    return TrainerSeen(
        id=f"rank on {device}", epoch=1, devices=(device,), phase="running", step=None, tokens_per_s=None,
        host_lag_share=None, pid=None, age_s=0.0, work=work,
    )  # fmt: skip
