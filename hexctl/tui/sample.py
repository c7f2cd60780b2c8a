"""A made-up run for the picture in the README, the tests and the benchmarks. Nothing here comes from a measurement."""

import math

from planner.record import replace
from runtime.api.wire import (
    CalibrationRow,
    DeviceRow,
    EventRow,
    FlowView,
    MigrationView,
    PlacementRow,
    PlanView,
    Proposal,
    RunView,
    Snapshot,
)

START_S = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC
NOW_S = START_S + 761.0


def device(index: int, **fields: object) -> DeviceRow:
    """Device n<i>/gpu<j>, eight a node unless `display` says otherwise; unnamed fields are unknown."""
    node, slot = f"n{index // 8}", index % 8
    row = DeviceRow(
        id=f"GPU-{index:04x}5173-9c2e-4f{index:02x}-a1b2-0123456789f5",
        display=f"{node}/gpu{slot}",
        kind="wide",
        node=node,
        index=slot,
        role="idle",
        status="ok",
        paced=False,
        replica=None,
        version=None,
        digest=None,
        util_share=None,
        memory_used_bytes=None,
        memory_total_bytes=None,
        power_w=None,
        temperature_c=None,
        tokens_per_s=None,
        predicted_tokens_per_s=None,
        usd_per_h=None,
        usd_per_mtok=None,
        running=None,
        slots=None,
        pid=None,
        cordoned=False,
        pinned=None,
        age_s=0.4,
    )
    return replace(row, **fields)


def small_fleet() -> tuple[DeviceRow, ...]:
    """Six devices of three kinds, one of each state worth showing."""
    gib = 2.0**30
    return (
        device(
            0,
            kind="fast",
            role="train",
            replica="t0",
            version=212,
            digest="9f3c41",
            util_share=0.97,
            memory_used_bytes=61 * gib,
            memory_total_bytes=80 * gib,
            power_w=640.0,
            temperature_c=71.0,
            tokens_per_s=1790.0,
            predicted_tokens_per_s=1755.0,
            usd_per_h=2.0,
            usd_per_mtok=0.31,
            pid=4101,
            pinned="train",
        ),
        device(
            1,
            role="rollout",
            replica="r0",
            version=212,
            digest="9f3c41",
            util_share=0.74,
            memory_used_bytes=74 * gib,
            memory_total_bytes=96 * gib,
            power_w=310.0,
            temperature_c=58.0,
            tokens_per_s=812.0,
            predicted_tokens_per_s=820.0,
            modelled_tokens_per_s=850.0,
            drift_factor=1.02,
            usd_per_h=1.1,
            usd_per_mtok=0.42,
            running=24,
            slots=32,
            pid=4102,
        ),
        device(
            2,
            role="rollout",
            status="draining",
            replica="r1",
            version=211,
            digest="7b10aa",
            util_share=0.31,
            memory_used_bytes=74 * gib,
            memory_total_bytes=96 * gib,
            power_w=250.0,
            temperature_c=54.0,
            tokens_per_s=240.0,
            usd_per_h=1.1,
            usd_per_mtok=0.44,
            running=5,
            slots=32,
            pid=4103,
        ),
        device(
            3,
            display="n1/gpu0",
            kind="old",
            role="rollout",
            status="throttled",
            replica="r2",
            version=212,
            digest="9f3c41",
            util_share=0.99,
            memory_used_bytes=18 * gib,
            memory_total_bytes=24 * gib,
            power_w=145.0,
            temperature_c=89.0,
            tokens_per_s=96.0,
            predicted_tokens_per_s=123.0,
            usd_per_h=0.34,
            usd_per_mtok=0.97,
            running=6,
            slots=6,
            pid=4104,
            age_s=0.6,
            note="thermal limit",
        ),
        device(4, display="n1/gpu1", kind="old", status="LOST", age_s=41.0, note="fallen off the bus"),
        device(
            5,
            display="n2/gpu0",
            kind="old",
            status="cordoned",
            cordoned=True,
            util_share=0.01,
            memory_used_bytes=0.0,
            memory_total_bytes=24 * gib,
            power_w=14.0,
            temperature_c=34.0,
            usd_per_h=0.34,
            age_s=0.5,
            note="by mia: fan noise",
        ),
    )


def plan_in_force(rows: tuple[DeviceRow, ...]) -> PlanView:
    """Revision 6: one trainer, three rollout replicas."""
    return PlanView(
        rev=6,
        scheduler="hex",
        placements=(
            PlacementRow(role="train", kind="fast", devices=(rows[0].id,), tp=1, pp=1, dp=1, rate_tokens_per_s=1755.0),
            PlacementRow(role="rollout", kind="wide", devices=(rows[1].id,), tp=1, pp=1, dp=1, rate_tokens_per_s=820.0),
            PlacementRow(role="rollout", kind="wide", devices=(rows[2].id,), tp=1, pp=1, dp=1, rate_tokens_per_s=790.0),
            PlacementRow(role="rollout", kind="old", devices=(rows[3].id,), tp=1, pp=1, dp=1, rate_tokens_per_s=123.0),
        ),
        step_s=2.31,
        train_s=2.24,
        rollout_s=2.31,
        tokens_per_s=1730.0,
        usd_per_h=3.12,
        usd_per_mtok=0.52,
        bound_tokens_per_s=1960.0,
        bound_scope="all divisions of this fleet",
        gap=0.117,
        solve_s=0.8,
        headline="rollout is the bottleneck: 2.31 s a step against 2.24 s of training",
        why=("n1/gpu1 was lost: three rollout replicas are left",),
        trigger="device lost: n1/gpu1",
        made_at_s=NOW_S - 39.0,
    )


def proposal(rows: tuple[DeviceRow, ...]) -> Proposal:
    """Revision 7: the second wide device joins the trainer, the throttled one goes idle."""
    plan = replace(
        plan_in_force(rows),
        rev=7,
        placements=(
            PlacementRow(
                role="train",
                kind="fast+wide",
                devices=(rows[0].id, rows[2].id),
                tp=1,
                pp=1,
                dp=2,
                rate_tokens_per_s=1850.0,
            ),
            PlacementRow(role="rollout", kind="wide", devices=(rows[1].id,), tp=1, pp=1, dp=1, rate_tokens_per_s=820.0),
        ),
        tokens_per_s=1838.0,
        usd_per_h=3.11,
        usd_per_mtok=0.47,
        step_s=2.17,
        train_s=2.17,
        rollout_s=2.05,
        gap=0.006,
        headline="answers grew 212 → 388 tokens: training is the bottleneck",
        why=(
            "n1/gpu0 is throttled: it costs $0.97/Mtok, above the fleet's 0.48",
            "n1/gpu0 kept on rollout instead: +0.4 % tok/s, +7 % $/Mtok",
            "one more wide device would give +11 % tok/s; eta 4 → 8 gives +1 %",
        ),
        trigger="drift: response length",
        made_at_s=NOW_S - 18.0,
    )
    return Proposal(plan=plan, expires_at_s=NOW_S + 42.0, gain_share=0.062)


def flow_view() -> FlowView:
    """A healthy run at version 212; the token identity holds."""
    return FlowView(
        version=212,
        eta=4,
        staleness_mean=1.4,
        staleness_p95=3.0,
        staleness_max=4,
        reward_mean=0.83,
        generated_tokens=1_402_118,
        trained_tokens=1_362_604,
        masked_tokens=2_211,
        in_flight_tokens=31_695,
        wasted_tokens={"refused append": 1_204, "dead letter": 404, "reward timeout": 4_000},
        redone_tokens=118,
        queue_groups=67,
        queue_batches=2.1,
        generated_tokens_per_s=1842.0,
        tokens_per_s=1790.0,
        usd_per_h=3.12,
        usd_per_mtok=0.48,
        power_w=None,
        kwh_per_mtok=None,
        trainer_wait_share=0.03,
        admission_wait_share=0.0,
        waits="trainer for data",
        samples_by_state={
            "PENDING": 96,
            "LEASED": 35,
            "SUSPENDED": 4,
            "DONE": 536,
            "RESERVED": 256,
            "APPLIED": 54_272,
            "DEAD_LETTER": 3,
        },
        steps_done=212,
        spans_two_versions_share=0.31,
        metrics={
            "reward_mean": 0.83,
            "response_tokens_mean": 8.4,
            "truncated_share": 0.02,
            "kl_behaviour": 0.0031,
            "entropy": 0.41,
            "grad_norm": 0.72,
            "clip_fraction": 0.041,
            "engine_trainer_logprob_diff": 1.2e-6,
            "staleness_mean": 1.4,
        },
    )


def series(points: int = 120) -> dict[str, tuple[float, ...]]:
    """Curves of a run that learns."""
    wobble = [math.sin(i * 0.9) * 0.5 + math.sin(i * 0.37) * 0.5 for i in range(points)]
    s = [i / (points - 1) for i in range(points)]
    return {
        "reward": tuple(
            0.06 + 0.8 / (1 + math.exp(-9 * (x - 0.45))) + 0.03 * w for x, w in zip(s, wobble, strict=True)
        ),
        "staleness_mean": tuple(1.4 + 0.5 * w - 1.2 * math.exp(-14 * x) for x, w in zip(s, wobble, strict=True)),
        "queue_batches": tuple(
            max(0.0, 2.1 * (1 - math.exp(-10 * x)) + 0.35 * w) for x, w in zip(s, wobble, strict=True)
        ),
        "generated_tokens_per_s": tuple(
            1842 * (1 - 0.5 * math.exp(-12 * x)) + 45 * w for x, w in zip(s, wobble, strict=True)
        ),
        "tokens_per_s": tuple(1790 * (1 - 0.7 * math.exp(-9 * x)) + 60 * w for x, w in zip(s, wobble, strict=True)),
        "usd_per_mtok": tuple(0.48 + 0.5 * math.exp(-8 * x) - 0.012 * w for x, w in zip(s, wobble, strict=True)),
    }


def event_rows() -> tuple[EventRow, ...]:
    """What happened lately, newest last."""
    told: tuple[tuple[float, str, str, str, str], ...] = (
        (760, "info", "run_started", "", "run local-7f3a started: 6 devices, eta 4, decoupled GRPO"),
        (758, "info", "plan_adopted", "", "plan r1 in force: +0 % (first plan), bound 2,410 tok/s, gap 1.2 %"),
        (699, "info", "weights_published", "t0", "v12 published in 41 ms, hash 9a31"),
        (401, "info", "replica_started", "r2", "r2 serves v96 on n1/gpu0"),
        (212, "warning", "device_throttled", "n1/gpu0", "n1/gpu0 throttled: 89 °C, thermal limit"),
        (180, "info", "device_cordoned", "n2/gpu0", "n2/gpu0 cordoned by mia: fan noise"),
        (44, "error", "device_lost", "n1/gpu1", "n1/gpu1 lost (driver says: fallen off the bus)"),
        (43.6, "info", "samples_resumed", "r0", "4 samples resumed on r0 from 118 tokens"),
        (39, "info", "plan_adopted", "", "plan r6 in force: −9 % tok/s after the loss"),
        (18, "info", "plan_proposed", "", "plan r7 proposed: +6.2 % tok/s, switch 4.2 s, no token lost"),
        (9, "info", "replica_draining", "r1", "r1 drains on n0/gpu2: 5 samples left"),
    )
    return tuple(
        EventRow(seq=i + 1, at_s=NOW_S - ago, level=level, kind=kind, message=message, subject=subject)  # type: ignore[arg-type]
        for i, (ago, level, kind, subject, message) in enumerate(told)
    )


def sample_snapshot(seq: int = 1) -> Snapshot:
    """A run of 12:41 minutes with a proposal open, one device lost, one throttled, one draining, one cordoned."""
    rows = small_fleet()
    return Snapshot(
        seq=seq,
        at_s=NOW_S,
        run=RunView(
            id="local-7f3a",
            name="local",
            folder="runs/local-7f3a",
            state="running",
            label="simulated",
            simulation_speed=60.0,
            started_at_s=START_S,
            consent="ask",
            hexctl_version="0.1.0",
            daemon_pid=4100,
            config_path="configs/local.toml",
        ),
        flow=flow_view(),
        flow_age_s=0.3,
        devices=rows,
        plan=plan_in_force(rows),
        proposal=proposal(rows),
        migration=MigrationView(
            running=("drain r1 on n0/gpu2 · 5 samples left",), waiting=("stop r1 · waits for the drain",)
        ),
        events=event_rows(),
        series=series(),
        resident_bytes=2.1 * 2**30,
        calibration=calibration(),
    )


def calibration() -> tuple[CalibrationRow, ...]:
    """What the run measured of two kinds."""
    return (
        CalibrationRow(
            kind="fast",
            role="train",
            factor=1.02,
            measured_factor=1.03,
            samples=41,
            devices=1,
            running=None,
            modelled_tokens_per_s=1755.0,
            measured_tokens_per_s=1808.0,
            modelled_step_s=2.1,
            measured_step_s=2.04,
            age_s=1.2,
        ),
        CalibrationRow(
            kind="wide",
            role="rollout",
            factor=0.93,
            measured_factor=0.94,
            samples=77,
            devices=2,
            running=22.5,
            modelled_tokens_per_s=850.0,
            measured_tokens_per_s=799.0,
            modelled_step_s=0.0265,
            measured_step_s=0.0282,
            age_s=0.7,
        ),
    )
