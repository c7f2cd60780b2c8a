"""Flow when its disk fails, its verifiers are silent or it starts anew: nothing is lost, nothing waits for ever."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import LedgerError
from runtime.rl.flow.records import JsonLines
from runtime.rl.ledger import audit
from runtime.rl.rewards.items import RewardResult
from runtime.rl.types import RunLimits
from tests.rl.flow_desk import Desk, piece, whole


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, eta=0)
    yield made
    made.flow.close()


@contextlib.contextmanager
def unwritable(desk: Desk) -> Iterator[None]:
    """The ledger refuses every write meanwhile."""
    connection = desk.flow._state.ledger.connection
    connection.execute("PRAGMA query_only=ON")
    try:
        yield
    finally:
        connection.execute("PRAGMA query_only=OFF")


def test_rewards_that_could_not_be_kept_are_asked_for_again(desk: Desk) -> None:
    desk.start()
    desk.exchange(appends=tuple(whole(x, 0) for x in desk.serve()))
    asked, desk.items = desk.items, []
    with unwritable(desk), pytest.raises(LedgerError):
        desk.flow.rewarded([RewardResult(sample=i.sample, reward=1.0) for i in asked])
    desk.wait(desk.settings.reward_deadline_s + 1)
    assert {i.sample for i in desk.items} == {i.sample for i in asked}
    desk.answer()
    assert desk.ask().batch is not None


def test_a_second_answer_in_one_call_counts_once(desk: Desk) -> None:
    desk.start()
    desk.exchange(appends=tuple(whole(x, 0) for x in desk.serve()))
    results = [RewardResult(sample=i.sample, reward=float(i.sample.member)) for i in desk.items]
    desk.flow.rewarded([*results, *results])
    batch = desk.ask().batch
    assert batch is not None
    assert [s.reward for s in batch.samples] == [0.0, 1.0, 0.0, 1.0]


def test_a_group_that_loses_all_its_samples_gives_its_slot_up_once(desk: Desk) -> None:
    """The admission bound stands: with eta = 0 exactly one step's worth of groups comes after the lost ones."""
    desk.start()
    desk.exchange(appends=tuple(whole(x, 0) for x in desk.serve()))
    desk.items.clear()
    desk.wait(2 * desk.settings.reward_deadline_s + 5)  # the verifiers never answer
    status = desk.flow.status()
    assert status.samples_by_state["DEAD_LETTER"] == 4
    book = desk.flow._state.ledger.book
    assert (book.counters["given_up"], book.next_slot) == (2, 0)
    assert desk.flow._state.admissible_groups() == 2
    assert {x.sample.group for x in desk.exchange().leases} == {2, 3}
    assert audit(desk.folder / "ledger.db").faults == ()


def test_a_lease_that_may_be_silent_for_long_does_not_stall_before(desk: Desk) -> None:
    desk.start()
    desk.flow.set_limits(1, RunLimits(lease_s=240.0))
    leases = desk.serve()
    for _ in range(3):
        desk.wait(75.0)
        desk.exchange()
    assert desk.flow.status().samples_by_state["LEASED"] == len(leases)
    desk.wait(30.0)
    assert desk.flow.status().samples_by_state["LEASED"] == 0


def test_leases_from_before_a_restart_of_flow_stall_too(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    desk.reopen()
    for _ in range(13):
        desk.wait(5.0)
        desk.exchange()  # the replica speaks, but of its samples it knows nothing
    assert desk.flow.status().samples_by_state["LEASED"] == 0
    assert {x.sample for x in desk.exchange("b").leases + desk.exchange("b").leases} <= {x.sample for x in leases}


def test_an_order_to_the_trainer_survives_a_restart_of_flow(desk: Desk) -> None:
    desk.start()
    desk.flow.set_trainer_order(1, 1, "quiesce")
    desk.reopen()
    assert desk.ask().order == "quiesce"
    desk.flow.set_trainer_order(1, 1, "train")
    desk.reopen()
    assert desk.ask().order == "wait"


def test_an_evaluation_goes_on_after_a_flush_that_could_not_be_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=2, eval_share=1.0)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange()
    leases = [x for x in (*held, *desk.exchange().leases, *desk.exchange().leases) if x.sample.group < 0]
    assert leases
    train = [x for x in desk.exchange().leases if x.sample.group >= 0] or [x for x in held if x.sample.group >= 0]
    both = (*(whole(x, 1) for x in leases), piece(train[0], [5], 1))
    request = desk.request(appends=both)
    with unwritable(desk), pytest.raises(LedgerError):
        desk.flow.exchange(request)
    desk.items.clear()
    desk.flow.exchange(request)
    assert {i.sample for i in desk.items if i.sample.group < 0} == {x.sample for x in leases}
    desk.flow.close()


def test_lines_refused_by_a_full_disk_are_written_when_it_has_room(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.mkdir()  # cannot be written
    desk.train(0)
    assert desk.flow._metrics.failed
    metrics.rmdir()
    desk.finish_all((*held, *desk.exchange().leases), 1)
    desk.train(1)
    assert [r["step"] for r in rows(metrics)] == [0, 1]
    desk.flow.close()


def test_a_cut_line_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    JsonLines(path).append({"step": 2}, {"step": 3})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "rew', '{"step": 2}', '{"step": 3}']


def rows(path: Path) -> list[dict[str, float]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]
