"""From what every source last said to one level. Pure: no Ray, no clock; `now_s` is monotonic seconds.

Unknown is not dead: a body is dead only when Ray says so, when its loop says so, or when its placement group has no actor.
"""

from planner.record import record
from runtime.backends.ray.actors.identity import ActorLevel
from runtime.backends.ray.calls import Answer, age
from runtime.backends.ray.executor import BodyNote
from runtime.backends.ray.names import BodyName
from runtime.core.observation import ReplicaPhase, ReplicaSeen, TrainerPhase, TrainerSeen, Work
from runtime.rl.types import EngineStats, FlowStatus, ReplicaStatus

LOST_OTHERS = "lost the others"  # a rank that ended since another one did
FRESH_S = 3.0  # a body that was heard of within this time is not unknown


@record
class BodySeen:
    """Everything known of one body."""

    body: BodyName
    devices: tuple[str, ...]
    ping: Answer  # value: ActorLevel
    missing: bool = False  # its placement group exists, its actor does not
    note: BodyNote | None = None
    others: tuple[Answer, ...] = ()  # pings of a trainer's ranks 1, 2, ...

    @property
    def level(self) -> ActorLevel | None:
        """What the actor last said of itself."""
        return _level(self.ping)

    @property
    def levels(self) -> tuple[ActorLevel | None, ...]:
        """What every actor of the body last said of itself."""
        return tuple(_level(p) for p in (self.ping, *self.others))

    def dead(self) -> str | None:
        """Why it is dead, in words; None when it is not known to be. A trainer is dead with any of its ranks; the reason is of
        the rank that went first, where that can be told from the others' loss of it."""
        if self.note is not None and self.note.reason:
            return self.note.reason
        found = [(r, why) for r, p in enumerate((self.ping, *self.others)) if (why := _dead(p)) is not None]
        if found:
            rank, why = min(found, key=lambda f: (LOST_OTHERS in f[1], f[0]))
            return f"rank {rank}: {why}" if self.others else why
        if self.missing and not (self.note is not None and self.note.starting):
            return "its process is gone"
        return None


def _level(ping: Answer) -> ActorLevel | None:
    return ping.value if isinstance(ping.value, ActorLevel) else None


def _dead(ping: Answer) -> str | None:
    """Why one actor is dead."""
    level = _level(ping)
    if ping.state == "dead":
        return ping.reason or "Ray says it is dead"
    if ping.state == "failed" and level is None:
        return ping.reason
    return level.reason if level is not None and level.phase == "failed" else None


def replica_level(seen: BodySeen, flow: FlowStatus | None, flow_age_s: float | None, now_s: float) -> ReplicaSeen:
    """A replica from Ray's word and flow's."""
    row = _row(seen.body, flow)
    stats = row.stats if row is not None else None
    exchange_age = row.last_exchange_age_s + (flow_age_s or 0.0) if row is not None else None
    why = seen.dead()
    phase = "dead" if why is not None else _replica_phase(seen, row, exchange_age, now_s)
    level = seen.level
    return ReplicaSeen(
        id=seen.body.id,
        epoch=seen.body.epoch,
        devices=seen.devices,
        phase=phase,
        version=row.version if row is not None else None,
        digest=row.digest if row is not None else None,
        running=stats.running if stats is not None else 0,
        slots=stats.slots if stats is not None else 0,
        tokens_per_s=stats.decode_tokens_per_s if stats is not None else None,
        kv_used_share=stats.kv_used_share if stats is not None else None,
        host_lag_share=stats.host_lag_share if stats is not None else None,
        pid=level.pid if level is not None else (row.pid or None if row is not None else None),
        age_s=exchange_age,
        leased=row.leased if row is not None else 0,
        reason=why or "",
        work=None if stats is None else _decoded(stats),
    )


def _decoded(stats: EngineStats) -> Work:
    return Work(
        busy_s=stats.busy_s,
        steps=stats.decode_steps,
        tokens=stats.decoded_tokens,
        prefill_tokens=stats.prefill_tokens,
    )


def _row(body: BodyName, flow: FlowStatus | None) -> ReplicaStatus | None:
    if flow is None:
        return None
    return next((r for r in flow.replicas if r.replica == body.id and r.epoch == body.epoch), None)


def _replica_phase(
    seen: BodySeen, row: ReplicaStatus | None, exchange_age_s: float | None, now_s: float
) -> ReplicaPhase:
    if row is not None and row.order == "drain" and row.leased == 0:
        return "drained"
    if _silent(seen, now_s) and (exchange_age_s is None or exchange_age_s > FRESH_S):
        return "starting" if seen.level is None else "unknown"
    if seen.level is not None and seen.level.phase == "ended":
        return "drained"
    if row is not None and row.order in ("drain", "stop"):
        return "draining"
    return "serving" if row is not None and row.verified else "starting"


def _silent(seen: BodySeen, now_s: float) -> bool:
    """Whether an actor of the body has not been heard of for a while."""
    heard = [age(p, now_s) for p in (seen.ping, *seen.others)]
    return any(h is None or h > FRESH_S for h in heard)


def trainer_level(
    seen: BodySeen, flow: FlowStatus | None, flow_age_s: float | None, now_s: float, *, quiescing: bool
) -> TrainerSeen:
    """A trainer from Ray's word and flow's."""
    mine = flow if flow is not None and flow.trainer_epoch == seen.body.epoch else None
    why = seen.dead()
    level = seen.level
    phase: TrainerPhase
    if why is not None:
        phase = "dead"
    elif (level is not None and level.phase == "ended") or (mine is not None and mine.trainer_state == "quiesced"):
        phase = "quiesced"
    elif _silent(seen, now_s) and level is not None:
        phase = "unknown"
    elif mine is None or mine.trainer_state == "absent" or level is None:
        phase = "starting"
    else:
        phase = "quiescing" if quiescing else "running"
    return TrainerSeen(
        id=seen.body.id,
        epoch=seen.body.epoch,
        devices=seen.devices,
        phase=phase,
        step=mine.step if mine is not None else None,
        tokens_per_s=mine.trained_tokens_per_s if mine is not None else None,
        host_lag_share=level.gauge.host_lag_share if level is not None else None,
        pid=level.pid if level is not None else None,
        age_s=None if mine is None or mine.trainer_age_s is None else mine.trainer_age_s + (flow_age_s or 0.0),
        reason=why or "",
        work=level.gauge.work if level is not None else None,
        rank_pids=tuple(None if a is None else a.pid for a in seen.levels) if seen.others else (),
    )
