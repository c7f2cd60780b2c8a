"""What goes over the control socket. JSON with `schema_version`; numbers carry their unit in the key; unknown is null."""

from collections.abc import Mapping
from typing import Literal

from planner.record import record

SCHEMA_VERSION = 1

FleetLabel = Literal["gpu", "cpu", "paced", "simulated", "mixed"]
RunState = Literal["starting", "running", "stopping", "finished", "failed"]
Level = Literal["info", "warning", "error"]


@record
class DeviceRow:
    """One device of the fleet."""

    id: str
    display: str  # "n0/gpu1"
    kind: str
    node: str
    index: int
    role: Literal["train", "rollout", "idle"]
    status: str  # ok | starting | draining | cordoned | LOST | HUNG | STALE | HOST-BOUND | slow | throttled
    paced: bool
    replica: str | None  # id of the replica or trainer on it
    version: int | None
    digest: str | None
    util_share: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None
    temperature_c: float | None
    tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    usd_per_h: float | None
    usd_per_mtok: float | None
    running: int | None
    slots: int | None
    pid: int | None
    cordoned: bool
    pinned: str | None  # role
    age_s: float | None
    note: str = ""
    modelled_tokens_per_s: float | None = None  # by the cost model, at the running batch it really had
    drift_factor: float | None = None  # its measured over modelled speed against its peers'; null without a peer
    speed: float = 1.0  # share of its kind's speed that plans count with; below 1: it was found slow

    @property
    def against_model(self) -> float | None:
        """Share by which it is faster (+) or slower (-) than the cost model says of the work that it did, or than the plan has it
        while nothing was measured of it."""
        expected = self.modelled_tokens_per_s or self.predicted_tokens_per_s
        return None if self.tokens_per_s is None or not expected else self.tokens_per_s / expected - 1


@record
class CalibrationRow:
    """Predicted beside measured for one device kind in one role, a device. Rates in the plan's terms: sampled tokens, or
    trained response tokens, while it works."""

    kind: str
    role: Literal["train", "rollout"]
    factor: float  # that the next plan counts with
    measured_factor: float | None  # as it stands now; null before there are enough samples
    samples: int
    devices: int
    running: float | None  # rollout: mean samples decoded at once
    modelled_tokens_per_s: float | None
    measured_tokens_per_s: float | None
    modelled_step_s: float | None  # of a decode step, or of an optimiser step
    measured_step_s: float | None
    age_s: float | None  # of the newest sample


@record
class PlacementRow:
    """One placement of a plan."""

    role: str
    kind: str
    devices: tuple[str, ...]
    tp: int
    pp: int
    dp: int
    rate_tokens_per_s: float | None


@record
class PlanView:
    """A plan with its prediction and proof."""

    rev: int
    scheduler: str
    placements: tuple[PlacementRow, ...]
    step_s: float
    train_s: float
    rollout_s: float
    tokens_per_s: float
    usd_per_h: float | None
    usd_per_mtok: float | None
    bound_tokens_per_s: float
    bound_scope: str
    gap: float
    solve_s: float
    headline: str
    why: tuple[str, ...]
    trigger: str  # what led to it
    made_at_s: float


@record
class Proposal:
    """A plan that waits for consent."""

    plan: PlanView
    expires_at_s: float | None
    gain_share: float | None  # predicted, against the plan in force


@record
class FlowView:
    """The first line's figures. `usd_per_mtok` and `kwh_per_mtok` are per million trained tokens, measured: null without
    prices, and unless every device that is there says its power."""

    version: int
    eta: int
    staleness_mean: float | None
    staleness_p95: float | None
    staleness_max: int | None
    reward_mean: float | None
    generated_tokens: int
    trained_tokens: int
    masked_tokens: int
    in_flight_tokens: int
    wasted_tokens: Mapping[str, int]
    redone_tokens: int
    queue_groups: int
    queue_batches: float
    generated_tokens_per_s: float
    tokens_per_s: float  # trained
    usd_per_h: float | None
    usd_per_mtok: float | None
    power_w: float | None  # of all devices
    kwh_per_mtok: float | None
    trainer_wait_share: float
    admission_wait_share: float
    # Seconds in which slots that fall empty have no new samples, by the median of the slowest replica's last exchanges.
    refill_s: float | None = None
    waits: str
    samples_by_state: Mapping[str, int]
    steps_done: int
    spans_two_versions_share: float | None
    metrics: Mapping[str, float]  # the newest line of metrics.jsonl


@record
class MigrationView:
    """What the reconciler is doing."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    blocked: str = ""  # why, and the options


@record
class EventRow:
    """One event, for people."""

    seq: int
    at_s: float
    level: Level
    kind: str
    message: str
    subject: str = ""  # device or replica


@record
class RunView:
    """Which run this is. `simulation_speed` is the virtual seconds that pass in a second, and null on real devices: rates and
    prices of a simulated run are of virtual time, `at_s` and `started_at_s` of real time."""

    id: str
    name: str
    folder: str
    state: RunState
    label: FleetLabel
    started_at_s: float
    consent: Literal["auto", "ask"]
    hexctl_version: str
    daemon_pid: int
    config_path: str = ""
    frozen: bool = False
    simulation_speed: float | None = None


@record
class Snapshot:
    """The one door out."""

    schema_version: int = SCHEMA_VERSION
    seq: int  # grows with every snapshot; for long-polling
    at_s: float
    run: RunView
    flow: FlowView | None  # None before flow answers
    flow_age_s: float | None
    devices: tuple[DeviceRow, ...]
    plan: PlanView | None
    proposal: Proposal | None
    infeasible: str = ""  # why there is no plan, else ""
    migration: MigrationView
    events: tuple[EventRow, ...]  # newest last, at most 200
    series: Mapping[
        str, tuple[float, ...]
    ]  # reward, staleness_mean, queue_batches, generated_tokens_per_s, tokens_per_s, usd_per_mtok; newest last
    resident_bytes: float | None = None
    problems: tuple[str, ...] = ()
    calibration: tuple[CalibrationRow, ...] = ()


CommandName = Literal["cordon", "uncordon", "drain", "pin", "unpin", "replan", "approve", "reject", "down"]


@record
class Command:
    """A request. `key` makes it idempotent: a repeated key answers as the first did."""

    schema_version: int = SCHEMA_VERSION
    name: CommandName
    key: str
    device: str | None = None  # id, display name or unambiguous prefix
    role: Literal["train", "rollout", "idle"] | None = None
    plan_rev: int | None = None  # approve, reject
    reason: str = ""
    author: str = ""
    force: bool = False  # allow an override that leaves no rollout or no trainer


@record
class CommandResult:
    """The daemon's answer."""

    accepted: bool
    message: str
    override_rev: int
    plan_rev: int | None


@record
class Health:
    """Who answers on the socket."""

    schema_version: int = SCHEMA_VERSION
    run: str
    state: RunState
    pid: int
    hexctl_version: str


@record
class ApiError:
    """What, where, got/expected, then hint; `code` is stable."""

    code: str  # bad_request | not_found | refused | stale_revision | internal | unsupported_schema
    message: str
    hint: str = ""
