"""Commands: what is recorded, what is answered, what is refused and with which hint."""

from typing import Any

import pytest
from values import NOW_S, fleet, solved, stored

from runtime.api.wire import Command, CommandResult
from runtime.core.command import handle, resolve
from runtime.core.fleet_event import DeviceLost, DeviceQuarantined
from runtime.core.fold import fold
from runtime.core.plan_event import PlanProposed
from runtime.core.state import ClusterState
from runtime.errors import RefusedError

PLAN = solved("a", "b", "c")


class Operator:
    """Speaks and sees the state change."""

    def __init__(self, state: ClusterState | None = None) -> None:
        self.state = state or fleet("a", "b", "c", plan=PLAN)
        self.said = 0

    def say(self, name: str, device: str | None = None, **fields: Any) -> CommandResult:
        self.said += 1
        c = Command(name=name, key=fields.pop("key", f"k{self.said}"), device=device, **fields)  # type: ignore[arg-type]
        events, result = handle(c, self.state, NOW_S)
        self.state = fold(self.state, stored(*events))
        return result


def test_a_cordon_is_recorded_with_author_and_reason_and_asks_for_a_plan() -> None:
    op = Operator()
    result = op.say("cordon", "b", author="ada", reason="fan is loud")
    assert (result.accepted, result.override_rev) == (True, 1)
    (o,) = op.state.overrides
    assert (o.device, o.kind, o.author, o.reason, o.at_s) == ("b", "cordon", "ada", "fan is loud", NOW_S)
    assert op.state.need is not None
    assert op.state.need.causes == {"operator"}


def test_what_is_so_already_changes_nothing() -> None:
    op = Operator()
    op.say("cordon", "b")
    rev, need = op.state.override_rev, op.state.need
    for name in ("cordon", "unpin"):
        assert op.say(name, "b").accepted
    assert op.say("uncordon", "c").message == "n0/gpu2 is not cordoned"
    assert (op.state.override_rev, op.state.need) == (rev, need)


def test_a_repeated_key_gets_the_first_answer_whatever_happened_since() -> None:
    op = Operator()
    first = op.say("cordon", "b", key="same")
    op.say("uncordon", "b")
    assert op.say("cordon", "b", key="same") == first
    assert op.state.overrides == ()


@pytest.mark.parametrize(("given", "device"), [("a", "a"), ("n0/gpu1", "b"), ("n0/gpu2", "c")])
def test_devices_by_id_or_name(given: str, device: str) -> None:
    assert resolve(given, fleet("a", "b", "c")) == device


def test_devices_by_prefix_and_near_misses() -> None:
    state = fleet("GPU-5173f5d5", "GPU-5180aaaa", "GPU-9")
    assert resolve("GPU-517", state) == "GPU-5173f5d5"
    with pytest.raises(RefusedError, match="ambiguous"):
        resolve("GPU-51", state)
    with pytest.raises(RefusedError, match="did you mean n0/gpu2"):
        resolve("n0/gp2", state)
    with pytest.raises(RefusedError, match="which device"):
        resolve(None, state)


def test_the_last_rollout_device_is_guarded_unless_forced() -> None:
    op = Operator()
    op.say("cordon", "b")
    with pytest.raises(RefusedError, match="alone would have to train and roll out"):
        op.say("cordon", "c")
    with pytest.raises(RefusedError, match="--force"):
        op.say("drain", "c")
    assert op.say("cordon", "c", force=True).accepted
    assert len(op.state.overrides) == 2


def test_pins_must_leave_a_trainer_and_a_rollout() -> None:
    op = Operator()
    op.say("pin", "a", role="train")
    op.say("pin", "b", role="idle")
    with pytest.raises(RefusedError, match="no device would be left for rollout"):
        op.say("pin", "c", role="idle")
    op = Operator()
    op.say("pin", "a", role="rollout")
    op.say("pin", "b", role="rollout")
    with pytest.raises(RefusedError, match="no device would be left to train"):
        op.say("pin", "c", role="rollout")


def test_one_device_trains() -> None:
    op = Operator()
    op.say("pin", "b", role="train")
    with pytest.raises(RefusedError, match="n0/gpu1 is pinned to train"):
        op.say("pin", "c", role="train")
    op.say("pin", "c", role="train", force=True)
    assert [(o.device, o.role) for o in op.state.overrides] == [("c", "train")]
    assert op.state.override_rev == 3


def test_a_cordoned_or_lost_device_is_not_pinned() -> None:
    op = Operator()
    op.say("cordon", "b")
    with pytest.raises(RefusedError, match="uncordon n0/gpu1 first"):
        op.say("pin", "b", role="rollout")
    op.state = fold(op.state, stored(DeviceLost(device="c", reason="gone")))
    with pytest.raises(RefusedError, match="lost"):
        op.say("pin", "c", role="rollout")
    with pytest.raises(RefusedError, match="which role"):
        op.say("pin", "a")


def test_approve_and_reject_carry_the_revision_they_saw() -> None:
    op = Operator()
    with pytest.raises(RefusedError, match="no plan is proposed"):
        op.say("approve", plan_rev=2)
    proposal = PlanProposed(solved=solved("b", "a", "c", rev=2), expires_at_s=NOW_S + 9, gain_share=0.1)
    op.state = fold(op.state, stored(proposal))
    for wrong in (1, 3):
        with pytest.raises(RefusedError, match="that revision is old"):
            op.say("approve", plan_rev=wrong)
    with pytest.raises(RefusedError, match="needs the plan revision"):
        op.say("reject")
    rejected = Operator(op.state)
    rejected.say("reject", plan_rev=2, reason="not now")
    assert (rejected.state.proposal, rejected.state.plan.rev) == (None, 1)  # type: ignore[union-attr]
    assert op.say("approve", plan_rev=2).plan_rev == 2
    assert op.state.plan is not None
    assert (op.state.plan.rev, op.state.proposal) == (2, None)


def test_uncordon_lifts_a_quarantine() -> None:
    op = Operator()
    op.state = fold(op.state, stored(DeviceQuarantined(device="b", failures=5, reason="exit 1")))
    op.say("uncordon", "b")
    assert op.state.devices["b"].quarantined == ""
    assert op.state.excluded("b") == ""


def test_down_is_idempotent_and_then_nothing_else_is_taken() -> None:
    op = Operator()
    op.say("down", author="ada")
    assert op.state.ending == "asked by the operator"
    assert op.say("down").accepted
    with pytest.raises(RefusedError, match="ending"):
        op.say("cordon", "b")
