"""How much consent an action needs, and what it says it would do."""

import pytest

from hexctl.tui.view.consent import Ask, Refusal, Request, weigh
from hexctl.tui.view.text import plain
from planner.record import replace
from runtime.api.wire import CommandName, DeviceRow, Snapshot
from tests.tui.samples import bare_snapshot, device, quiet_snapshot, sample_snapshot


def _ask(name: CommandName, s: Snapshot, *indices: int, role: str | None = None) -> Ask:
    out = weigh(name, s, [s.devices[i] for i in indices], role)  # type: ignore[arg-type]
    assert isinstance(out, Ask)
    return out


def _impact(ask: Ask) -> str:
    return "\n".join(plain(x) for x in ask.impact)


def test_levels_of_ordinary_actions() -> None:
    s = sample_snapshot()
    assert _ask("cordon", s, 1).level == 0
    assert _ask("uncordon", s, 5).level == 0
    assert _ask("pin", s, 1, role="rollout").level == 0
    assert _ask("unpin", s, 0).level == 0
    assert _ask("drain", s, 1).level == 1
    assert _ask("replan", s).level == 1
    assert _ask("approve", s).level == 1
    assert _ask("reject", s).level == 0


@pytest.mark.parametrize("name", ["cordon", "drain"])
def test_the_last_rollout_devices_need_a_name_typed(name: CommandName) -> None:
    s = sample_snapshot()
    ask = _ask(name, s, 1, 2, 3)
    assert ask.level == 2
    assert ask.type_to_confirm == "local-7f3a"
    assert all(r.force for r in ask.requests)
    assert "No device would generate rollouts" in _impact(ask)
    alone = replace(s, devices=s.devices[:2])
    assert _ask(name, alone, 1).type_to_confirm == "n0/gpu1"
    assert _ask(name, s, 1, 2).level == (1 if name == "drain" else 0)
    assert not any(r.force for r in _ask(name, s, 1, 2).requests)


def test_pinning_the_last_rollout_device_to_training_needs_a_name() -> None:
    s = sample_snapshot()
    two = replace(s, devices=s.devices[:2])
    assert _ask("pin", two, 1, role="train").level == 2
    assert _ask("pin", two, 1, role="rollout").level == 0
    assert _ask("pin", two, 0, role="rollout").level == 2


def test_taking_the_trainer_away_needs_a_name_only_when_nothing_is_left() -> None:
    s = sample_snapshot()
    assert _ask("cordon", s, 0).level == 0  # others can train
    two = replace(s, devices=s.devices[:2])
    ask = _ask("cordon", two, 0)
    assert ask.level == 2
    assert "No device would be left to train on" in _impact(ask)


def test_the_whole_fleet_needs_a_name() -> None:
    s = replace(sample_snapshot(), devices=tuple(device(i) for i in range(3)))
    assert _ask("cordon", s, 0, 1, 2).level == 2
    assert _ask("uncordon", s, 0, 1, 2).level == 0


def test_the_impact_comes_from_the_snapshot() -> None:
    s = sample_snapshot()
    text = _impact(_ask("drain", s, 1))
    assert "r0 serves 24 samples on n0/gpu1" in text
    assert "generation −71 %" in text
    assert "t0 trains on n0/gpu0" in _impact(_ask("drain", s, 0))
    assert "holds no replica" in _impact(_ask("drain", s, 5))
    assert "its samples" in _impact(
        _ask("drain", replace(s, devices=(replace(s.devices[1], running=None), *s.devices[2:])), 0)
    )


def test_what_takes_it_back() -> None:
    s = sample_snapshot()
    ids = [d.id for d in s.devices]
    assert _ask("cordon", s, 1).undo == (Request(name="uncordon", device=ids[1]),)
    assert _ask("drain", s, 1).undo == (Request(name="uncordon", device=ids[1]),)
    assert _ask("uncordon", s, 5).undo == (Request(name="cordon", device=ids[5]),)
    assert _ask("pin", s, 1, role="train").undo == (Request(name="unpin", device=ids[1]),)
    assert _ask("pin", s, 0, role="rollout").undo == (Request(name="pin", device=ids[0], role="train"),)
    assert _ask("unpin", s, 0).undo == (Request(name="pin", device=ids[0], role="train"),)
    assert _ask("replan", s).undo == ()


def test_consent_carries_the_revision_that_was_seen() -> None:
    s = sample_snapshot()
    for name in ("approve", "reject"):
        assert _ask(name, s).requests == (Request(name=name, plan_rev=7),)  # type: ignore[arg-type]
    assert "n0/gpu2  rollout → train (DP 2)" in _impact(_ask("approve", s))
    assert "+6.2 % tok/s" in _impact(_ask("approve", s))


def test_actions_without_a_subject_are_refused() -> None:
    assert isinstance(weigh("approve", quiet_snapshot(), ()), Refusal)
    assert isinstance(weigh("reject", bare_snapshot(), ()), Refusal)
    nothing: list[DeviceRow] = []
    assert isinstance(weigh("cordon", sample_snapshot(), nothing), Refusal)


def test_devices_are_named_by_identity_never_by_place() -> None:
    s = sample_snapshot()
    for name in ("cordon", "drain", "uncordon", "unpin"):
        assert [r.device for r in _ask(name, s, 1, 2).requests] == [s.devices[1].id, s.devices[2].id]  # type: ignore[arg-type]


def test_replan_says_that_it_is_its_own_consent() -> None:
    s = sample_snapshot()
    for consent in ("ask", "auto"):
        assert "in force at once" in _impact(_ask("replan", replace(s, run=replace(s.run, consent=consent))))
