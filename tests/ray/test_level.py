"""From Ray's word and flow's to one level: unknown is not dead, and dead has a reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.backends.ray.actors.identity import ActorLevel, ActorPhase
from runtime.backends.ray.calls import Answer
from runtime.backends.ray.executor import BodyNote
from runtime.backends.ray.level import BodySeen, replica_level, trainer_level
from runtime.backends.ray.names import BodyName, rank_names
from runtime.rl.types import EngineStats, FlowStatus, ReplicaStatus

REPLICA = BodyName(role="replica", id="r", epoch=3)
TRAINER = BodyName(role="trainer", id="t", epoch=5)
NOW = 1000.0


def actor(phase: ActorPhase = "running", reason: str = "") -> ActorLevel:
    return ActorLevel(
        name="a", pid=77, group=77, start_ticks=1, hexctl_version="0", phase=phase, reason=reason, devices=("d",)
    )


def body(
    name: BodyName = REPLICA, *, heard_s: float | None = 0.5, phase: ActorPhase = "running", **more: Any
) -> BodySeen:
    """A body whose actor answered `heard_s` seconds ago."""
    ping = (
        Answer(state="never")
        if heard_s is None
        else Answer(state="answered", value=actor(phase, "broke" if phase == "failed" else ""), at_s=NOW - heard_s)
    )
    return replace(BodySeen(body=name, devices=("d",), ping=ping), **more)


def flow(
    *, order: str = "serve", leased: int = 2, verified: bool = True, exchange_s: float = 0.1, **more: Any
) -> FlowStatus:
    """Flow that knows the replica and the trainer."""
    row = ReplicaStatus(
        replica="r",
        epoch=3,
        order=order,  # type: ignore[arg-type]
        version=4,
        digest="x",
        verified=verified,
        leased=leased,
        stats=EngineStats(running=leased, slots=8, decode_tokens_per_s=9.0),
        last_exchange_age_s=exchange_s,
        unflushed_tokens=0,
        pid=77,
    )
    status = FlowStatus(
        step=4, lineage=0, weights=None, eta=2, generated_tokens=0, trained_tokens=0, masked_tokens=0, in_flight_tokens=0,
        wasted_tokens={}, redone_tokens=0, samples_by_state={}, queue_groups=0, admitted_groups=0, staleness_mean=None,
        staleness_p95=None, staleness_max=None, spans_two_versions_share=None, reward_mean=None,
        generated_tokens_per_s=0.0, trained_tokens_per_s=6.0, trainer_wait_share=0.0, admission_wait_share=0.0, waits="",
        replicas=(row,), trainer_epoch=5, trainer_state="waiting", trainer_age_s=0.2, finished=False, last_metrics={},
    )  # fmt: skip
    return replace(status, **more)


@pytest.mark.parametrize(
    ("seen", "status", "phase"),
    [
        (body(), flow(), "serving"),
        (body(), flow(verified=False), "starting"),
        (body(), flow(order="drain"), "draining"),
        (body(), flow(order="drain", leased=0), "drained"),
        (body(), None, "starting"),  # flow has not said anything yet
        (body(heard_s=60.0), flow(exchange_s=60.0), "unknown"),
        (body(heard_s=60.0), flow(exchange_s=0.1), "serving"),  # it still speaks to flow
        (body(heard_s=None), flow(replicas=()), "starting"),
        (body(phase="ended"), flow(order="stop", leased=0), "drained"),
        (body(phase="failed"), flow(), "dead"),
        (body(ping=Answer(state="dead", at_s=NOW, reason="gone")), flow(), "dead"),
        (body(heard_s=None, missing=True), flow(replicas=()), "dead"),
        (
            body(heard_s=None, missing=True, note=BodyNote(devices=("d",), starting=True)),
            flow(replicas=()),
            "starting",
        ),
        (body(heard_s=None, note=BodyNote(devices=("d",), starting=False, reason="no place")), flow(), "dead"),
    ],
)
def test_phase_of_a_replica(seen: BodySeen, status: FlowStatus | None, phase: str) -> None:
    got = replica_level(seen, status, 0.0, NOW)
    assert got.phase == phase
    assert (got.reason != "") == (phase == "dead")


@pytest.mark.parametrize(
    ("seen", "status", "quiescing", "phase"),
    [
        (body(TRAINER), flow(), False, "running"),
        (body(TRAINER), flow(), True, "quiescing"),
        (body(TRAINER), flow(trainer_state="quiesced"), True, "quiesced"),
        (body(TRAINER), flow(trainer_epoch=4), False, "starting"),  # flow still speaks of the one before
        (body(TRAINER, phase="starting"), flow(trainer_epoch=4), False, "starting"),
        (body(TRAINER, heard_s=60.0), flow(), False, "unknown"),
        (body(TRAINER, phase="failed"), flow(), False, "dead"),
        (body(TRAINER, phase="ended"), flow(), False, "quiesced"),
        (body(TRAINER, heard_s=None, missing=True), flow(), False, "dead"),
    ],
)
def test_phase_of_a_trainer(seen: BodySeen, status: FlowStatus, quiescing: bool, phase: str) -> None:
    assert trainer_level(seen, status, 0.0, NOW, quiescing=quiescing).phase == phase


def rank(*, heard_s: float = 0.5, pid: int = 78, phase: ActorPhase = "running", reason: str = "") -> Answer:
    """The answer of a trainer's rank 1."""
    return Answer(state="answered", value=replace(actor(phase, reason), pid=pid), at_s=NOW - heard_s)


LOST = "RunError: rank 0 of the trainer lost the others while it waited for gradients"


@pytest.mark.parametrize(
    ("first", "second", "phase", "reason"),
    [
        (rank(pid=77), rank(), "running", ""),
        (rank(pid=77), rank(heard_s=60.0), "unknown", ""),
        (rank(pid=77), Answer(state="dead", at_s=NOW, reason="a signal"), "dead", "rank 1: a signal"),
        (
            rank(phase="failed", reason=LOST),
            Answer(state="dead", at_s=NOW, reason="a signal"),
            "dead",
            "rank 1: a signal",
        ),
        (
            rank(phase="failed", reason=LOST),
            rank(phase="failed", reason="out of memory"),
            "dead",
            "rank 1: out of memory",
        ),
        (rank(phase="failed", reason="disk full"), rank(phase="failed", reason=LOST), "dead", "rank 0: disk full"),
    ],
)
def test_a_trainer_of_two_ranks_is_as_well_as_its_worst(first: Answer, second: Answer, phase: str, reason: str) -> None:
    """Any dead rank is the trainer's death; the reason is of the one that went first, not of those that lost it."""
    seen = BodySeen(body=TRAINER, devices=("d", "e"), ping=first, others=(second,))
    got = trainer_level(seen, flow(), 0.0, NOW, quiescing=False)
    assert (got.phase, got.reason) == (phase, reason)
    if phase == "running":
        assert [got.pid_on(d) for d in ("d", "e")] == [77, 78]


def test_a_trainer_has_an_actor_a_device_and_a_replica_one() -> None:
    assert rank_names(TRAINER, ("d", "e", "f")) == ("trainer-5", "trainer-5-rank1", "trainer-5-rank2")
    assert rank_names(REPLICA, ("d", "e")) == ("replica-r-3",)


@given(heard=st.none() | st.floats(0, 1e4), exchange=st.floats(0, 1e4), age=st.floats(0, 1e4))
def test_silence_alone_never_kills(heard: float | None, exchange: float, age: float) -> None:
    """However long nobody answers, a body that nobody called dead is not dead, and the age says how long."""
    got = replica_level(body(heard_s=heard), flow(exchange_s=exchange), age, NOW)
    assert got.phase in ("serving", "unknown", "starting")
    assert got.age_s == exchange + age
