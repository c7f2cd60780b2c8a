"""The staleness rule against brute force: what can still be trained in time, by trying every order."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidInput
from runtime.policy.staleness import GroupView, StalenessPolicy, ages


def group(ordinal: int, *, started: int | None = None, complete: bool = False, slot: int | None = None) -> GroupView:
    return GroupView(ordinal=ordinal, slot=ordinal if slot is None else slot, complete=complete, started=started)


@given(eta=st.integers(0, 6), prompts=st.integers(1, 5), members=st.integers(1, 4), version=st.integers(0, 6))
def test_admission_is_the_published_formula(eta: int, prompts: int, members: int, version: int) -> None:
    """floor((N_r - 1) / B) <= i + eta with N_r samples admitted, B = prompts * members."""
    policy = StalenessPolicy(eta=eta, prompts_per_step=prompts)
    batch = prompts * members
    for slot in range(80):
        samples = (slot + 1) * members
        assert policy.admits(slot, version) == ((samples - 1) // batch <= version + eta)
    assert policy.capacity(version) == sum(policy.admits(slot, version) for slot in range(80))


def test_admission_after_a_resume_counts_what_was_admitted_before() -> None:
    policy = StalenessPolicy(eta=4, prompts_per_step=32)
    at_500 = [slot for slot in range(500 * 32, 600 * 32) if policy.admits(slot, 500)]
    assert len(at_500) == (4 + 1) * 32 == policy.most_outstanding


def test_eta_zero_is_synchronous() -> None:
    policy = StalenessPolicy(eta=0, prompts_per_step=4)
    for step in range(5):
        mine = range(4 * step, 4 * step + 4)
        assert [s for s in range(40) if policy.admits(s, step) and policy.min_version(s) == step] == list(mine)
        assert policy.capacity(step) == 4 * (step + 1)
        assert policy.token_weights([step - 1, step], step) == (0.0, 1.0)


@given(eta=st.integers(0, 4), versions=st.lists(st.integers(0, 9), max_size=9), step=st.integers(0, 9))
def test_weights_and_ages(eta: int, versions: list[int], step: int) -> None:
    policy = StalenessPolicy(eta=eta, prompts_per_step=1)
    weights = policy.token_weights(versions, step)
    assert [w == 1.0 for w in weights] == [step - v <= eta for v in versions]
    counted = ages([v for v in versions if v <= step], step)
    assert sorted(itertools.chain(*([a] * n for a, n in counted.items()))) == sorted(
        step - v for v in versions if v <= step
    )


def test_mask_takes_the_oldest_complete_groups_and_never_waits_for_others() -> None:
    policy = StalenessPolicy(eta=1, prompts_per_step=2)
    views = [group(0, started=0), group(3, started=2, complete=True), group(1, started=0, complete=True),
             group(2, started=1, complete=True)]  # fmt: skip
    assert policy.select(views, 5).groups == (1, 2)
    assert policy.select(views[:2], 5).waits_for == "1 more complete groups"


def test_drop_gives_up_what_is_too_old_complete_or_not() -> None:
    policy = StalenessPolicy(eta=1, prompts_per_step=1, stale="drop")
    views = [group(0, started=2, complete=True), group(1, started=2), group(2, started=4, complete=True), group(3)]
    selection = policy.select(views, 4)
    assert (selection.groups, selection.evicted) == ((2,), (0, 1))


def feasible(starts: Sequence[int], step: int, eta: int, prompts: int) -> bool:
    """Whether every group begun can be trained at age <= eta from `step` on, when all were complete: earliest deadline
    first is optimal for unit jobs on one machine, so sorting by deadline decides."""
    deadlines = sorted(s + eta for s in starts)
    return all(step + i // prompts <= d for i, d in enumerate(deadlines))


@given(
    eta=st.integers(0, 3),
    prompts=st.integers(1, 3),
    step=st.integers(0, 6),
    data=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=9),
)
def test_wait_takes_a_step_exactly_when_the_rest_can_still_be_trained_in_time(
    eta: int, prompts: int, step: int, data: list[tuple[int, bool]]
) -> None:
    policy = StalenessPolicy(eta=eta, prompts_per_step=prompts, stale="wait")
    views = [group(i, started=min(v, step), complete=c) for i, (v, c) in enumerate(data)]
    selection = policy.select(views, step)
    complete = sorted((g for g in views if g.complete), key=lambda g: (g.started, g.ordinal))
    taken = {g.ordinal for g in complete[:prompts]}
    starts = [g.started for g in views if g.ordinal not in taken and g.started is not None]
    expected = len(complete) >= prompts and feasible(starts, step + 1, eta, prompts)
    assert (set(selection.groups) == taken and bool(selection.groups)) == expected
    assert bool(selection.waits_for) == (not expected)


@given(
    eta=st.integers(0, 3), prompts=st.integers(1, 2), step=st.integers(0, 5),
    starts=st.lists(st.integers(0, 5), max_size=8), slot=st.integers(0, 12), version=st.integers(0, 5),
)  # fmt: skip
def test_wait_leases_only_what_leaves_every_deadline_feasible(
    *, eta: int, prompts: int, step: int, starts: list[int], slot: int, version: int
) -> None:
    policy = StalenessPolicy(eta=eta, prompts_per_step=prompts, stale="wait")
    starts = [min(s, step) for s in starts]
    version = min(version, step)
    others = [group(i, started=s) for i, s in enumerate(starts)]
    if not feasible(starts, step, eta, prompts):
        return
    allowed = policy.may_lease(group(99, slot=slot), version, step, others)
    assert allowed == (version >= policy.min_version(slot) and feasible([*starts, version], step, eta, prompts))


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_wait_never_blocks_for_ever_and_never_exceeds_the_bound(eta: int) -> None:
    """A hand-made world: groups start at once on the newest weights, or on older ones where that is allowed, and complete
    in the worst order. Every step goes through, and no group is older than eta."""
    policy = StalenessPolicy(eta=eta, prompts_per_step=2, stale="wait")
    live: dict[int, GroupView] = {}
    admitted = 0
    for step in range(30):
        while policy.admits(admitted, step):
            live[admitted] = group(admitted)
            admitted += 1
        for old in range(max(0, step - eta), step + 1):
            for g in list(live.values()):
                others = [o for o in live.values() if o.ordinal != g.ordinal]
                if g.started is None and policy.may_lease(g, old, step, others):
                    live[g.ordinal] = group(g.ordinal, started=old)
        for ordinal in sorted((o for o, g in live.items() if g.started is not None), reverse=True):
            g = live[ordinal]
            live[ordinal] = group(ordinal, started=g.started, complete=True)
            selection = policy.select(list(live.values()), step)
            if selection.groups:
                break
        assert selection.groups, f"step {step} never goes through: {selection.waits_for}"
        for ordinal in selection.groups:
            started = live.pop(ordinal).started
            assert started is not None
            assert step - started <= eta


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput):
        StalenessPolicy(eta=-1, prompts_per_step=1)
    with pytest.raises(InvalidInput):
        StalenessPolicy(eta=0, prompts_per_step=0)
