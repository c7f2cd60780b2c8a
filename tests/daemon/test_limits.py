"""Whose deadline comes first: a unit's own, as the configuration gives it, never the daemon's patience with it."""

from pathlib import Path

import pytest

from runtime.config.schema import Config, ModelSection, RolloutSection, TrainerSection
from runtime.core.limits import CPU_LEASE_S, CPU_LIMITS, Limits
from runtime.daemon.service import limits_of, run_limits
from runtime.rl.types import RunLimits

SMALL, SEVEN_B = 0.27e9, 15.2e9  # bytes of a generation
HASHED_BYTES_PER_S = 1e9  # of which no core does more than about so many
MODEL = ModelSection(source="seeded", path=Path("unused"))


def config(
    engine: str = "vllm", *, start: float = 280.0, token: float = 60.0, meet: float = 180.0, collective: float = 300.0
) -> Config:
    rollout = {"engine": engine, "start_deadline": start, "token_deadline": token}
    trainer = {"meet_deadline": meet, "collective_deadline": collective}
    return Config(
        model=MODEL,
        rollout=RolloutSection.model_validate(rollout),
        trainer=TrainerSection.model_validate(trainer),
    )


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("label", ["gpu", "cpu", "paced"])
def test_the_deadlines_that_are_given_by_default_are_below_the_limits_as_they_are(engine: str, label: str) -> None:
    assert limits_of(config(engine), label, SMALL) == (CPU_LIMITS if label == "cpu" else Limits())


def test_a_unit_is_not_ended_before_the_time_that_it_was_given() -> None:
    """An engine of a large model that may take ten minutes to start is not ended, again and again, after five."""
    assert limits_of(config(start=600.0), "gpu", SMALL).start_s > 600.0
    assert limits_of(config(meet=900.0), "gpu", SMALL).start_s > 900.0
    assert limits_of(config(token=300.0), "gpu", SMALL).progress_s > 300.0
    assert limits_of(config(collective=1800.0), "gpu", SMALL).trainer_silent_s > 1800.0


def test_what_only_vllm_waits_for_is_vllms() -> None:
    assert limits_of(config("torch", start=600.0, token=300.0), "gpu", SMALL) == Limits()


def test_a_replica_that_loads_a_large_model_from_disk_is_neither_ended_nor_robbed_of_its_leases() -> None:
    """It says nothing to flow meanwhile; that takes longer than a small model's replica may be silent."""
    hashed_s = SEVEN_B / HASHED_BYTES_PER_S
    assert hashed_s > Limits().exchange_s
    assert limits_of(config(), "gpu", SEVEN_B).exchange_s > 2 * hashed_s
    assert run_limits(None, "gpu", SEVEN_B).lease_s > 2 * hashed_s
    assert run_limits(7, "gpu", SMALL) == RunLimits(steps=7)
    assert run_limits(None, "cpu", SEVEN_B).lease_s == CPU_LEASE_S < CPU_LIMITS.exchange_s
