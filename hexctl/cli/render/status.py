"""A snapshot as documents and as text. Pure."""

from typing import Any

from hexctl.cli.render.text import DASH, counted, duration, money, number, pairs, share, signed, size, table
from runtime.api.wire import CalibrationRow, DeviceRow, Snapshot

_FLOW = (
    "version", "eta", "staleness_mean", "staleness_p95", "staleness_max", "reward_mean", "generated_tokens",
    "trained_tokens", "masked_tokens", "in_flight_tokens", "wasted_tokens", "redone_tokens", "queue_groups",
    "queue_batches", "tokens_per_s", "generated_tokens_per_s", "usd_per_h", "usd_per_mtok", "trainer_wait_share",
    "admission_wait_share", "refill_s", "waits", "steps_done", "spans_two_versions_share", "samples_by_state", "metrics",
)  # fmt: skip


def status_document(s: Snapshot) -> dict[str, Any]:
    """The keys of `hexctl status --output json`. What is not known is null: all figures before flow answers."""
    flow = {key: _plain(getattr(s.flow, key)) if s.flow is not None else None for key in _FLOW}
    return {
        "schema_version": s.schema_version,
        "run": s.run.id,
        "name": s.run.name,
        "state": s.run.state,
        "label": s.run.label,
        "simulation_speed": s.run.simulation_speed,
        "uptime_s": s.at_s - s.run.started_at_s,
        "plan_rev": s.plan.rev if s.plan is not None else None,
        "proposal_rev": s.proposal.plan.rev if s.proposal is not None else None,
        **flow,
        "flow_age_s": s.flow_age_s,
        "devices": len(s.devices),
        "daemon_pid": s.run.daemon_pid,
        "resident_bytes": s.resident_bytes,
        "infeasible": s.infeasible,
        "blocked": s.migration.blocked,
        "problems": list(s.problems),
        "calibration": [
            {name: getattr(r, name) for name in CalibrationRow.__dataclass_fields__} for r in s.calibration
        ],
    }


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else value


def status_text(s: Snapshot) -> str:
    """The figures for people."""
    lines = [
        f"{s.run.id}  {s.run.state}  {duration(s.at_s - s.run.started_at_s)}  {counted(len(s.devices), 'device', 'devices')}, {_label(s)}"
    ]
    rows = [("plan", _plan_line(s))]
    if s.flow is None:
        rows.append(("flow", "does not answer yet"))
    else:
        rows += _flow_rows(s)
    if s.proposal is not None:
        gain = share(s.proposal.gain_share, 1)
        rows.append(
            (
                "proposed",
                f"r{s.proposal.plan.rev}: {s.proposal.plan.headline} ({gain}); hexctl approve {s.proposal.plan.rev}",
            )
        )
    running = ", ".join((*s.migration.running, *s.migration.waiting))
    rows += [
        (n, v) for n, v in (("migration", running), ("blocked", s.migration.blocked), ("infeasible", s.infeasible)) if v
    ]
    rows += [("problem", p) for p in s.problems]
    rows += [(f"{r.kind} {r.role}", _calibration_line(r)) for r in s.calibration]
    return "\n".join([*lines, pairs(rows)])


def _label(s: Snapshot) -> str:
    speed = s.run.simulation_speed
    return s.run.label if speed is None else f"{s.run.label} at {speed:,.4g}x real time: every tok/s is of virtual time"


def _calibration_line(r: CalibrationRow) -> str:
    running = "" if r.running is None else f" at {number(r.running, 1)} running"
    return (
        f"measured {number(r.measured_tokens_per_s)} tok/s a device{running}, model {number(r.modelled_tokens_per_s)}; "
        f"step {duration(r.measured_step_s)}, model {duration(r.modelled_step_s)}; "
        f"the next plan counts with x {r.factor:.2f} ({number(r.samples)} samples)"
    )


def _plan_line(s: Snapshot) -> str:
    if s.plan is None:
        return DASH
    return (
        f"r{s.plan.rev}  {s.plan.headline}  (predicted {number(s.plan.tokens_per_s)} tok/s, gap {share(s.plan.gap, 1)})"
    )


def _flow_rows(s: Snapshot) -> list[tuple[str, str]]:
    f = s.flow
    assert f is not None
    wasted = ", ".join(f"{reason} {number(n)}" for reason, n in f.wasted_tokens.items() if n) or "none"
    return [
        ("waits", f"trainer {share(f.trainer_wait_share)} for data, rollout {share(f.admission_wait_share)} for admission"
                  + (f"; {f.waits}" if f.waits else "")),
        *([] if f.refill_s is None else [("refill", f"a slot that falls empty has its next sample within {f.refill_s:.2f} s")]),
        ("staleness", f"mean {number(f.staleness_mean, 1)}  p95 {number(f.staleness_p95, 1)}  max {number(f.staleness_max)}  eta {f.eta}"),
        ("queue", f"{f.queue_groups} groups, {f.queue_batches:.1f} batches"),
        ("rate", f"generated {number(f.generated_tokens_per_s)} tok/s, trained {number(f.tokens_per_s)} tok/s"),
        ("cost", f"{money(f.usd_per_h, '/h')}  {money(f.usd_per_mtok, '/Mtok')}"),
        *([] if f.kwh_per_mtok is None else [("energy", f"{number(f.kwh_per_mtok, 3)} kWh/Mtok at {number(f.power_w)} W")]),
        ("reward", f"{number(f.reward_mean, 3)} over the last steps; weights v{f.version}, {f.steps_done} steps"),
        ("tokens", f"generated {number(f.generated_tokens)} = trained {number(f.trained_tokens)} + masked {number(f.masked_tokens)}"
                   f" + in flight {number(f.in_flight_tokens)} + wasted {number(sum(f.wasted_tokens.values()))}"),
        ("wasted", f"{wasted}; redone {number(f.redone_tokens)}"),
    ]  # fmt: skip


def gpus_document(s: Snapshot) -> list[dict[str, Any]]:
    """The devices, field by field as the API gives them."""
    return [{name: getattr(d, name) for name in DeviceRow.__dataclass_fields__} for d in s.devices]


def gpus_text(s: Snapshot) -> str:
    """A row a device."""
    headers = (
        "DEVICE",
        "KIND",
        "ROLE",
        "STATUS",
        "REPLICA",
        "UTIL",
        "MEM",
        "POWER",
        "°C",
        "TOK/S",
        "vs MODEL",
        "DRIFT",
        "$/Mtok",
        "v",
        "AGE",
        "NOTE",
    )
    return table(headers, [_row(d) for d in s.devices], right=(5, 6, 7, 8, 9, 10, 11, 12, 13, 14))


def _row(d: DeviceRow) -> tuple[str, ...]:
    memory = DASH if d.memory_used_bytes is None else size(d.memory_used_bytes)
    if d.memory_used_bytes is not None and d.memory_total_bytes is not None:
        memory += f"/{size(d.memory_total_bytes)}"
    marks = [d.note] if d.note else []
    if d.pinned:
        marks.insert(0, f"pinned {d.pinned}")
    if d.speed < 1:
        marks.append(f"at {d.speed:.2f} of its kind's speed")
    if d.paced:
        marks.append("paced")
    return (
        d.display, d.kind, d.role, d.status, d.replica or DASH, share(d.util_share), memory, number(d.power_w, 0, " W"),
        number(d.temperature_c), number(d.tokens_per_s), signed(d.against_model),
        signed(None if d.drift_factor is None else d.drift_factor - 1),
        DASH if d.usd_per_mtok is None else f"{d.usd_per_mtok:.2f}", number(d.version), duration(d.age_s), ", ".join(marks),
    )  # fmt: skip
