"""A backend that does no work, in virtual time: the test world. Always labelled simulated."""

import math
from collections.abc import Iterable

from planner.cluster import Cluster
from runtime.backends.simulated.fleet import REPLICA_PHASES, TRAINER_PHASES, SimBody, SimFleet
from runtime.backends.simulated.script import Behaviour, Fault
from runtime.core.action import Step
from runtime.core.observation import (
    Observation,
    ReplicaSeen,
    TrainerSeen,
    Work,
)
from runtime.rl.types import EngineStats, FlowStatus, ReplicaStatus, WeightsRef

LABEL = "simulated"


class SimulatedBackend:
    """Implements `Backend`. Time is whatever `observe` is told; tokens are a fluid that flows at declared rates."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        behaviour: Behaviour | None = None,
        faults: Iterable[Fault] = (),
        seed: int = 0,
        eta: int = 4,
        steps: int | None = None,
    ) -> None:
        self._behaviour = behaviour or Behaviour()
        self.fleet = SimFleet(cluster.devices, self._behaviour, faults, seed)
        self.finished = False
        self._eta, self._steps_limit = eta, steps
        self._generated = self._trained = 0.0
        self._open = True  # admission
        self._decoded: dict[tuple[str, int], float] = {}
        self._busy_s: dict[tuple[str, int], float] = {}  # of replicas and trainers

    def observe(self, now_s: float) -> Observation:
        """Advance the fleet to `now_s` and say what is there."""
        self._flow_until(now_s)
        bodies = self.fleet.bodies.values()
        return Observation(
            at_s=now_s,
            devices=self.fleet.seen(now_s),
            replicas=tuple(self._replica(b, now_s) for b in bodies if not b.trains),
            trainers=tuple(self._trainer(b, now_s) for b in bodies if b.trains),
            flow=self._flow(now_s),
            flow_age_s=0.0,
        )

    def apply(self, step: Step) -> None:
        """Begin `step`; it may be lost or late, as the behaviour says."""
        self.fleet.begin(step)

    def finish(self, deadline_s: float) -> None:
        """End every body."""
        self.fleet.bodies.clear()
        self.finished = True

    def close(self) -> None:
        """Nothing holds on to anything here."""

    def _flow_until(self, now_s: float) -> None:
        before_s = self.fleet.now_s
        self.fleet.advance(now_s)
        dt_s, b = max(0.0, now_s - before_s), self._behaviour
        room = (self._eta + 1) * b.tokens_per_step - (self._generated - self._trained)
        serving = [x for x in self.fleet.bodies.values() if self._works(x) and not x.trains]
        wish = dt_s * sum(self._rate(x) for x in serving)
        share = 1.0 if wish <= room or wish == 0 else max(0.0, room / wish)
        self._open = share > 0
        for x in serving:
            tokens = share * dt_s * self._rate(x)
            self._decoded[x.id, x.epoch] = self._decoded.get((x.id, x.epoch), 0.0) + tokens
            self._busy_s[x.id, x.epoch] = self._busy_s.get((x.id, x.epoch), 0.0) + share * dt_s
            self._generated += tokens
        trainer = next((x for x in self.fleet.bodies.values() if self._works(x) and x.trains), None)
        if trainer is not None:
            before = self._trained
            rate = self._rate(trainer)
            self._trained = min(self._generated, before + dt_s * rate)
            key, tokens = (trainer.id, trainer.epoch), self._trained - before
            self._decoded[key] = self._decoded.get(key, 0.0) + tokens
            self._busy_s[key] = self._busy_s.get(key, 0.0) + tokens / rate

    def _rate(self, x: SimBody) -> float:
        b = self._behaviour
        return (b.train_tokens_per_s if x.trains else b.rollout_tokens_per_s) * self.fleet.speed(x)

    def _work(self, b: SimBody, tokens_per_step: float) -> Work:
        tokens = self._decoded.get((b.id, b.epoch), 0.0)
        steps = math.floor(tokens / tokens_per_step)
        busy_s = self._busy_s.get((b.id, b.epoch), 0.0)
        return Work(busy_s=busy_s, steps=steps, tokens=math.floor(tokens))

    @staticmethod
    def _works(b: SimBody) -> bool:
        return b.phase == "serving" and b.hung_since_s is None

    def _age_s(self, b: SimBody, now_s: float) -> float:
        return 0.0 if b.hung_since_s is None else now_s - b.hung_since_s

    def _replica(self, b: SimBody, now_s: float) -> ReplicaSeen:
        works = self._works(b)
        return ReplicaSeen(
            id=b.id,
            epoch=b.epoch,
            devices=b.devices,
            phase=REPLICA_PHASES[b.phase],
            version=self._version() if b.phase in ("serving", "draining") else None,
            digest=None,
            running=self._behaviour.slots if self._open and b.phase == "serving" else 0,
            slots=self._behaviour.slots,
            tokens_per_s=self._rate(b) if works else 0.0,
            kv_used_share=None,
            host_lag_share=None,
            pid=b.pid,
            age_s=self._age_s(b, now_s),
            leased=self._leased(b),
            reason=b.reason,
            work=self._work(b, self._behaviour.slots),
        )

    def _leased(self, b: SimBody) -> int:
        if b.phase == "serving" or b.served:
            return self._behaviour.slots
        return self._behaviour.slots // 2 if b.phase == "draining" else 0

    def _trainer(self, b: SimBody, now_s: float) -> TrainerSeen:
        return TrainerSeen(
            id=b.id,
            epoch=b.epoch,
            devices=b.devices,
            phase=TRAINER_PHASES[b.phase],
            step=self._version() if b.phase == "serving" else None,
            tokens_per_s=self._rate(b) if self._works(b) else 0.0,
            host_lag_share=None,
            pid=b.pid,
            age_s=self._age_s(b, now_s),
            reason=b.reason,
            work=self._work(b, self._behaviour.tokens_per_step),
        )

    def _version(self) -> int:
        return math.floor(self._trained / self._behaviour.tokens_per_step)

    def _flow(self, now_s: float) -> FlowStatus:
        b, version = self._behaviour, self._version()
        generated = math.floor(self._generated)
        trained = min(generated, math.floor(version * b.tokens_per_step))
        trainer = next((x for x in self.fleet.bodies.values() if x.trains and x.phase != "dead"), None)
        serving = [x for x in self.fleet.bodies.values() if self._works(x) and not x.trains]
        return FlowStatus(
            step=version,
            lineage=0,
            weights=WeightsRef(lineage=0, version=version, path="", digest="simulated"),
            eta=self._eta,
            generated_tokens=generated,
            trained_tokens=trained,
            masked_tokens=0,
            in_flight_tokens=generated - trained,
            wasted_tokens={},
            redone_tokens=0,
            samples_by_state={"APPLIED": math.floor(trained / b.tokens_per_sample)},
            queue_groups=0,
            admitted_groups=0,
            staleness_mean=None,
            staleness_p95=None,
            staleness_max=None,
            spans_two_versions_share=None,
            reward_mean=None,
            generated_tokens_per_s=sum(self._rate(x) for x in serving),
            trained_tokens_per_s=self._rate(trainer) if trainer is not None and self._works(trainer) else 0.0,
            trainer_wait_share=0.0,
            admission_wait_share=0.0,
            waits="",
            replicas=tuple(self._status(x, now_s) for x in self.fleet.bodies.values() if not x.trains),
            trainer_epoch=None if trainer is None else trainer.epoch,
            trainer_state="absent" if trainer is None else "training",
            trainer_age_s=None,
            finished=self._steps_limit is not None and version >= self._steps_limit,
            last_metrics={},
            steps_done=version,
        )

    def _status(self, b: SimBody, now_s: float) -> ReplicaStatus:
        decoded = math.floor(self._decoded.get((b.id, b.epoch), 0.0))
        running = self._behaviour.slots if self._open and b.phase == "serving" else 0
        return ReplicaStatus(
            replica=b.id,
            epoch=b.epoch,
            order="drain" if b.phase in ("draining", "drained") else "serve",
            version=self._version(),
            digest=None,
            verified=b.phase == "serving",
            leased=self._leased(b),
            stats=EngineStats(running=running, slots=self._behaviour.slots, decoded_tokens=decoded),
            last_exchange_age_s=self._age_s(b, now_s),
            unflushed_tokens=0,
            pid=b.pid,
        )
