"""Whole runs in virtual time under faults: nothing trained twice, tokens add up, the bound holds, the run goes on."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.staleness import StalePolicy
from runtime.rl.ledger import audit
from runtime.rl.types import SampleId
from tests.rl.flow_world import World, response_length, response_token, scratch

FAULTS = ("kill", "pause", "crash flow", "kill trainer", "order", "second incarnation")


def check(world: World, eta: int, steps: int) -> None:
    """What must be true after any history."""
    found = audit(world.folder / "ledger.db")
    status = world.flow.status()
    assert found.faults == ()
    assert found.balanced
    assert (found.generated, found.trained, found.masked, found.in_flight) == (
        status.generated_tokens, status.trained_tokens, status.masked_tokens, status.in_flight_tokens
    )  # fmt: skip
    assert {r: n for r, n in found.wasted.items() if n} == status.wasted_tokens
    seen: dict[SampleId, int] = {}
    trained = masked = 0
    limit = world.settings.max_new_tokens
    for batch in world.batches():
        assert len({s.sample.group for s in batch.samples}) == world.settings.policy.prompts_per_step
        for s in batch.samples:
            assert s.sample not in seen, f"{s.sample} trained at {seen[s.sample]} and {batch.step}"
            seen[s.sample] = batch.step
            # Whole responses, whatever happened to whoever made them.
            assert len(s.tokens) == response_length(s.sample, limit)
            expected = [response_token(s.sample, i, limit) for i in range(len(s.tokens))]
            assert list(zip(s.tokens, s.logprobs, strict=True)) == expected
            for version, weight in zip(s.versions, s.weights, strict=True):
                assert weight in (0.0, 1.0)
                assert version <= batch.step
                assert (weight == 1.0) == (batch.step - version <= eta)
                trained, masked = trained + int(weight), masked + 1 - int(weight)
    assert [b.step for b in world.batches()] == list(range(steps))
    assert (trained, masked) == (found.trained, found.masked)
    for attempts in world.trained.values():
        assert len({a.ids_hash for a in attempts}) == 1, "a step was run again with other samples"
        assert all(a.samples == attempts[0].samples for a in attempts)
    if status.staleness_max is not None:
        assert status.staleness_max <= eta


def inject(world: World, fault: str, name: str) -> None:
    if fault == "kill" and world.replicas[name].alive:
        world.kill_replica(name)
    elif fault == "pause":
        world.pause_replica(name, 7.0)
    elif fault == "crash flow":
        world.crash_flow()
    elif fault == "kill trainer":
        world.trainer_died(world.trainer)
    elif fault == "order":
        world.flow.set_order(1, name, world.replicas[name].epoch, "drain")
        epoch = world.replicas[name].epoch
        world.after(1.0, lambda: world.flow.set_order(1, name, epoch, "serve"))
    elif fault == "second incarnation":
        old = world.replicas[name]
        world.add_replica(name, step_s=old.step_s, slots=old.slots)  # the old one lives on as a zombie


@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    eta=st.integers(0, 4),
    stale=st.sampled_from(["mask", "wait", "drop"]),
    speeds=st.lists(st.sampled_from([0.05, 0.1, 0.2, 0.4]), min_size=1, max_size=3),
    train_s=st.sampled_from([0.1, 0.5, 1.5]),
    fault_rate=st.sampled_from([0.0, 0.1]),
    faults=st.lists(st.tuples(st.floats(0.0, 4.0), st.sampled_from(FAULTS), st.integers(0, 2)), max_size=5),
    eval_every=st.sampled_from([0, 2]),
)
def test_random_runs(
    *,
    seed: int,
    eta: int,
    stale: StalePolicy,
    speeds: list[float],
    train_s: float,
    fault_rate: float,
    faults: list[tuple[float, str, int]],
    eval_every: int,
) -> None:
    steps = 5
    with scratch() as folder:
        world = World(
            folder, seed=seed, eta=eta, stale=stale, train_s=train_s, fault_rate=fault_rate, steps=steps,
            eval_every=eval_every,
        )  # fmt: skip
        for i, step_s in enumerate(speeds):
            world.add_replica(f"r{i}", step_s=step_s, slots=3)
        for at, fault, index in faults:
            world.after(at, lambda f=fault, i=index: inject(world, f, f"r{i % len(speeds)}"))  # type: ignore[misc]
        assert world.run(400.0, until=lambda: world.flow.status().finished), world.flow.status()
        check(world, eta, steps)
        status = world.flow.status()
        if stale == "wait":
            assert status.masked_tokens == 0
        if eta == 0 and not status.wasted_tokens:
            assert status.masked_tokens == 0
            for batch in world.batches():
                assert {s.sample.group for s in batch.samples} == set(range(3 * batch.step, 3 * batch.step + 3))
                assert {v for s in batch.samples for v in s.versions} == {batch.step}


def run(world: World, seconds: float = 300.0) -> Any:
    assert world.run(seconds, until=lambda: world.flow.status().finished), world.flow.status()
    return world.flow.status()


def test_masking_really_happens_when_a_replica_is_slow() -> None:
    with scratch() as folder:
        world = World(folder, eta=1, train_s=0.2, steps=12, limit=24)
        world.add_replica("fast", step_s=0.05)
        world.add_replica("slow", step_s=0.3)
        status = run(world)
        check(world, 1, 12)
        assert status.masked_tokens > 0
        assert status.spans_two_versions_share > 0.1


def test_replicas_warm_up_and_stay_full_while_there_is_work() -> None:
    """Samples end all the time, so a replica is never as full when it asks as it was when it was served."""
    with scratch() as folder:
        world = World(folder, eta=8, prompts_per_step=16, responses=4, limit=8, steps=None, train_s=0.1)
        replicas = [world.add_replica(name, step_s=0.1, slots=32) for name in ("a", "b")]
        world.run(2.0)
        before = [(r.steps, r.slot_steps) for r in replicas]
        world.run(3.0)
        for replica, (steps, slot_steps) in zip(replicas, before, strict=True):
            assert (replica.slot_steps - slot_steps) / (replica.steps - steps) > 0.75 * replica.slots


def test_a_killed_replica_costs_at_most_its_unflushed_tokens_and_its_samples_go_on() -> None:
    with scratch() as folder:
        world = World(folder, eta=4, limit=40, steps=4)
        world.add_replica("a", step_s=0.1)
        world.add_replica("b", step_s=0.1)
        world.run(2.05)
        status = world.flow.status()
        held = next(r.leased for r in status.replicas if r.replica == "a")
        assert held > 0
        world.kill_replica("a")
        redone_most = world.replicas["a"].decoded
        world.run(1.1)
        after = world.flow.status()
        assert 0 <= after.redone_tokens <= min(redone_most, 2 * 4)
        resumed = [h for r in world.replicas.values() for h in r.held.values() if h.epoch > 1]
        assert any(h.length > 0 for h in resumed), "no sample resumed from a non-empty prefix"
        run(world)
        check(world, 4, 4)


def test_a_hanging_replica_loses_its_leases_and_what_it_says_later_is_wasted() -> None:
    with scratch() as folder:
        world = World(folder, eta=2, limit=30, steps=3)
        slow = world.add_replica("a", step_s=0.2)
        assert world.run(20.0, until=lambda: world.now > 2.0 and len(slow.appends) > 0)
        world.pause_replica("a", 20.0)  # it has decoded tokens that it did not flush
        world.add_replica("b", step_s=0.1)
        run(world)
        world.run(60.0)
        check(world, 2, 3)
        status = world.flow.status()
        assert status.wasted_tokens["zombie"] > 0
        assert set(status.wasted_tokens) == {"zombie"}
        assert status.samples_by_state["DEAD_LETTER"] == 0


def test_flow_comes_back_with_its_counters() -> None:
    with scratch() as folder:
        world = World(folder, eta=2, steps=6)
        world.add_replica("a", step_s=0.1)
        world.run(4.0)
        before = world.flow.status()
        world.crash_flow()
        after = world.flow.status()
        for name in (
            "step", "generated_tokens", "trained_tokens", "masked_tokens", "in_flight_tokens", "wasted_tokens",
            "samples_by_state", "staleness_mean", "staleness_max", "spans_two_versions_share", "reward_mean", "weights",
        ):  # fmt: skip
            assert getattr(before, name) == getattr(after, name), name
        # Admission is counted from the ledger, not from zero (a bound that restarts at 0 would admit everything again).
        run(world)
        assert world.flow.status().admitted_groups <= 6 * 3
        check(world, 2, 6)


def test_evaluation_runs_beside_training_and_never_delays_the_end() -> None:
    import json

    with scratch() as folder:
        world = World(folder, eta=2, steps=9, eval_every=2, limit=6)
        world.add_replica("a", step_s=0.05, slots=8)
        status = run(world)
        rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows][:3] == [2, 4, 6]
        assert all(r["n"] == 3 and r["versions"][0] >= r["step"] for r in rows)
        assert status.generated_tokens == status.trained_tokens + status.masked_tokens + status.in_flight_tokens
        check(world, 2, 9)


def test_an_evaluation_whose_replica_dies_goes_on_elsewhere() -> None:
    with scratch() as folder:
        world = World(folder, eta=2, steps=12, eval_every=1, limit=30, train_s=2.0)
        world.add_replica("a", step_s=0.1, slots=8)
        world.add_replica("b", step_s=0.1, slots=8)

        def holder() -> str | None:
            return next((n for n, r in world.replicas.items() if any(s.group < 0 for s in r.held)), None)

        assert world.run(60.0, until=lambda: holder() is not None)
        name = holder()
        assert name is not None
        world.kill_replica(name)
        path = folder / "evaluations.jsonl"
        assert world.run(60.0, until=path.exists)
        check_steps = world.flow.status().steps_done
        assert check_steps > 0


def test_silent_verifiers_become_dead_letters_and_the_run_goes_on_when_they_are_back() -> None:
    with scratch() as folder:
        world = World(folder, eta=1, steps=3)
        world.verifiers_silent = True
        world.add_replica("a", step_s=0.05)
        world.run(70.0)
        assert "verifiers have owed" in world.flow.status().waits
        world.run(70.0)
        status = world.flow.status()
        assert status.samples_by_state["DEAD_LETTER"] > 0
        assert set(status.wasted_tokens) <= {"reward_timeout", "group_lost"}
        world.verifiers_silent = False
        run(world)
        check(world, 1, 3)


def test_finish_ends_even_with_a_round_of_evaluation_and_samples_under_way() -> None:
    with scratch() as folder:
        world = World(folder, eta=3, steps=None, eval_every=1, limit=30)
        world.add_replica("a", step_s=0.1, slots=6)
        world.add_replica("b", step_s=0.3, slots=6)
        world.run(8.0)
        world.flow.finish(1)
        assert world.run(3.0, until=lambda: world.flow.status().finished)
        status = world.flow.status()
        assert status.samples_by_state["LEASED"] == 0
        assert all(r.leased == 0 for r in status.replicas)
        check(world, 3, status.steps_done)


@pytest.mark.parametrize("lost", [1, 2])
def test_lost_checkpoints_fork_the_lineage_and_train_the_same_samples_again(lost: int) -> None:
    with scratch() as folder:
        world = World(folder, eta=2, steps=7)
        world.add_replica("a", step_s=0.05)
        assert world.run(60.0, until=lambda: world.flow.status().steps_done == 4)
        done = {b.step: b.ids_hash for b in world.batches()}
        del world.checkpoints[-lost:]
        world.trainer_died(world.trainer)
        world.run(0.01)
        status = world.flow.status()
        assert (status.lineage, status.steps_done) == (1, 4 - lost)
        run(world)
        again = {b.step: b.ids_hash for b in world.batches()}
        assert {s: again[s] for s in done} == done
        assert world.flow.status().weights.version == 7
        found = audit(folder / "ledger.db")
        assert found.faults == ()
        seen = [s.sample for b in world.batches() for s in b.samples]
        assert len(seen) == len(set(seen))
