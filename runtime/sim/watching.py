"""What the simulated units have done, measured as the runtime measures its own, and the devices found slow by it.

Replicas tell decode seconds, steps and tokens. A rank of the trainer is taken to be timed by itself, without its waits for
the others: an assumption, since the runtime's trainer tells one figure for all its devices.
"""

from collections.abc import Mapping, Sequence

from planner.plan import Placement, Plan, Prediction
from planner.problem import Problem
from runtime.core.calibrating import Calibrating, Modelled, calibrate
from runtime.core.drifting import Drifting, aside, doubtful, drift, drift_reason, retry_reason, speeds
from runtime.core.event import Event, Stored
from runtime.core.fleet_event import DeviceRetried
from runtime.core.fold import fold
from runtime.core.modelled import CostedWork
from runtime.core.observation import Observation, ReplicaSeen, TrainerSeen, Work
from runtime.core.state import ClusterState, DeviceBelief
from runtime.policy.drift import DriftRule
from runtime.sim.figures import StepSeen
from runtime.sim.flow import SimulatedFlow


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
        beliefs = {
            d.id: DeviceBelief(id=d.id, kind=d.kind, node=d.node, index=d.index, region=d.region)
            for d in problem.cluster.devices
        }
        self._state = ClusterState(devices=beliefs)
        self._calibrating = Calibrating()
        self._drifting = Drifting()
        self._ranks: dict[str, Work] = {}
        self._training: tuple[str, ...] = ()  # devices of the trainer that made the newest step
        self._model: tuple[Plan, _Costed] | None = None

    @property
    def devices(self) -> Mapping[str, DeviceBelief]:
        """What is believed of each device."""
        return self._state.devices

    @property
    def doubtful(self) -> frozenset[str]:
        """Devices that may be found slow soon."""
        return doubtful(self._drifting)

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
        self._ranks |= ranks
        self._training = train.devices

    def look(self, flow: SimulatedFlow, placed: Mapping[str, Placement]) -> str:
        """Measure and judge as the daemon does; answers with why a plan is needed, "" when none is."""
        if self._model is None:
            return ""
        now_s, model = flow.now_s, self._model[1]
        seen = Observation(
            at_s=now_s,
            devices=(),
            replicas=_replicas(flow, placed),
            trainers=tuple(_rank(d, work) for d, work in self._ranks.items() if d in self._training),
            flow=None,
            flow_age_s=None,
        )
        slow = aside(self._state, self._drifting)
        events, self._calibrating = calibrate(seen, self._state, self._calibrating, lambda: model, now_s, aside=slow)
        self._fold(events, now_s)
        drifted, self._drifting = drift(self._calibrating, self._state, self._drifting, self.rule, now_s)
        self._fold(drifted, now_s)
        self.speeds = speeds(self._state)
        return ", ".join(
            retry_reason(e, e.device) if isinstance(e, DeviceRetried) else drift_reason(e, ", ".join(e.devices))
            for e in drifted
        )

    def _fold(self, events: Sequence[Event], now_s: float) -> None:
        self._state = fold(self._state, (Stored(seq=0, at_s=now_s, event=e) for e in events))


def _replicas(flow: SimulatedFlow, placed: Mapping[str, Placement]) -> tuple[ReplicaSeen, ...]:
    d = flow.decoding
    seen = list(zip(*(a.tolist() for a in (d.spent[:, 0], d.v, d.decoded, d.version, d.n)), strict=True))
    found = []
    for name, p in placed.items():
        if name not in flow.numbers:
            continue
        i = flow.numbers[name]
        busy_s, steps, tokens, version, running = seen[i]
        # Of n samples n * slots_used take a token in a step, so there were more steps than tokens of a sample.
        work = Work(busy_s=busy_s, steps=int(steps / d.lanes[i].speed.slots_used), tokens=int(tokens))
        found.append(
            ReplicaSeen(
                id=name, epoch=1, devices=p.devices, phase="serving", version=version, digest=None, running=running,
                slots=d.lanes[i].speed.slots, tokens_per_s=None, kv_used_share=None, host_lag_share=None, pid=None,
                age_s=0.0, work=work,
            )
        )  # fmt: skip
    return tuple(found)


def _rank(device: str, work: Work) -> TrainerSeen:
    return TrainerSeen(
        id=f"rank on {device}", epoch=1, devices=(device,), phase="running", step=None, tokens_per_s=None,
        host_lag_share=None, pid=None, age_s=0.0, work=work,
    )  # fmt: skip
