"""Flow and its daemon; held-out evaluation; building it from a configuration."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.record import replace
from runtime.config.schema import Config
from runtime.errors import ConfigError, RefusedError
from runtime.paths import RunPaths
from runtime.rl.flow import open_flow
from runtime.rl.ledger import audit
from runtime.rl.tokenizer import CharTokenizer
from runtime.rl.types import Lease, RunLimits
from tests.rl.flow_desk import EOS, SLOTS, Desk, piece, whole


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.flow.close()


# The daemon


def test_an_older_daemon_is_refused_everything(desk: Desk) -> None:
    desk.flow.expect_replica(5, "a", 1)
    flow = desk.flow
    calls = (
        lambda: flow.expect_replica(4, "a", 1),
        lambda: flow.set_order(4, "a", 1, "stop"),
        lambda: flow.forget_replica(4, "a", 1, 0),
        lambda: flow.set_trainer_order(4, 1, "stop"),
        lambda: flow.forget_trainer(4, 1),
        lambda: flow.set_limits(4, RunLimits(steps=1)),
        lambda: flow.set_cost(4, 1.0),
        lambda: flow.finish(4),
    )
    for call in calls:
        with pytest.raises(RefusedError, match="newer daemon"):
            call()
    desk.reopen()
    with pytest.raises(RefusedError, match="newer daemon"):
        desk.flow.expect_replica(4, "a", 1)
    assert [r.order for r in desk.flow.status().replicas] == ["serve"]


def test_orders_survive_a_restart_of_flow(desk: Desk) -> None:
    desk.start()
    desk.flow.set_order(1, "a", 1, "drain")
    desk.reopen()
    assert desk.exchange().order == "drain"


def test_a_replica_that_only_the_ledger_remembers_is_shown_no_longer_and_may_come_back(desk: Desk) -> None:
    desk.start()
    desk.flow.set_order(1, "a", 1, "drain")
    leases = desk.serve("b")
    desk.reopen()
    assert {r.replica for r in desk.flow.status().replicas} == {"a", "b"}
    desk.wait(70.0)
    status = desk.flow.status()
    assert (status.replicas, status.samples_by_state["LEASED"]) == ((), 0)
    assert desk.exchange("a").order == "drain"
    late = desk.exchange("b", appends=(piece(leases[0], [5], 0),))
    assert (late.order, late.ack_seq, late.cancel) == ("serve", desk.seqs["b", 1], (leases[0].sample,))
    assert {r.replica for r in desk.flow.status().replicas} == {"a", "b"}


# Evaluation


def test_evaluation_takes_a_small_share_and_is_dropped_at_the_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=8)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=tuple(whole(x, 0) for x in held))
    reply = desk.exchange()
    probes = [x for x in reply.leases if x.sample.group < 0]
    assert len(probes) == SLOTS // 8
    before = desk.flow.status()
    desk.exchange(appends=tuple(whole(p, 1) for p in probes))
    after = desk.flow.status()
    assert before.generated_tokens == after.generated_tokens, "evaluation is not in the ledger"
    assert audit(tmp_path / "ledger.db").faults == ()
    desk.flow.finish(1)
    late = desk.exchange(appends=(whole(replace(probes[0], epoch=probes[0].epoch + 1), 1),))
    assert (late.order, late.leases) == ("drain", ())
    desk.answer()
    assert not (tmp_path / "evaluations.jsonl").exists()
    desk.exchange(released=tuple(sorted(desk.flow._state.held(desk.flow._state.replicas.get("a", 1)))))  # type: ignore[arg-type]
    desk.ask()
    assert desk.flow.status().finished


def test_a_probe_of_a_lost_replica_goes_on_at_once_from_its_tokens(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=1)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=tuple(whole(x, 0) for x in held))
    (probe,) = [x for x in desk.serve() if x.sample.group < 0]
    desk.exchange(appends=(piece(probe, [5], 1),))
    desk.flow.forget_replica(1, "a", 1, 0)
    (again,) = [x for x in desk.serve("b") if x.sample.group < 0]
    assert (again.sample, again.tokens) == (probe.sample, (5,))
    desk.exchange("b", appends=(piece(again, [6, EOS], 1, finished="eos"),))
    desk.answer(0.5)
    (row,) = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert (row["step"], row["reward_mean"], row["n"], row["versions"]) == (1, 0.5, 1, [1, 1])


def test_a_probe_that_gets_no_token_is_leased_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=1)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=tuple(whole(x, 0) for x in held))
    (probe,) = [x for x in desk.serve() if x.sample.group < 0]
    given: list[Lease] = []
    for _ in range(8):
        desk.wait(10.0)
        replies = desk.exchange(), desk.exchange("b")  # its holder speaks, but says nothing of it
        given += [x for reply in replies for x in reply.leases if x.sample == probe.sample]
    assert [x.epoch > probe.epoch for x in given] == [True]
    late = desk.exchange(appends=(piece(probe, [5], 1),))
    assert probe.sample in late.cancel, "the old lease is over"


# Building it


def config(tmp_path: Path, **task: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"source": "seeded", "path": "m"},
            "task": {"source": "copy", "reward_timeout": "4 s", **task},
            "algorithm": {"mode": "sync", "eta": 4, "prompts_per_step": 3, "stale_policy": "wait"},
        }
    )


def test_flow_from_a_configuration_and_a_run_folder(desk: Desk, tmp_path: Path) -> None:
    paths = RunPaths(folder=tmp_path / "run", short=tmp_path / "s")
    paths.folder.mkdir()
    flow = open_flow(config(tmp_path), paths, CharTokenizer(), desk, clock=lambda: desk.now)
    status = flow.status()
    assert (status.eta, status.steps_done, status.waits) == (0, 0, "no trainer")
    assert paths.ledger.exists()
    flow.close()
    with pytest.raises(ConfigError, match="planning only"):
        open_flow(replace_task(config(tmp_path)), paths, CharTokenizer(), desk)


def replace_task(c: Config) -> Config:
    return c.model_copy(update={"task": None})


def test_flow_needs_neither_torch_nor_ray() -> None:
    code = "import sys, runtime.rl.flow, runtime.rl.rewards; print([m for m in ('torch', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
