"""A whole run that generates with vLLM on a CPU: daemon, Ray, vLLM, trainer, ledger; its replica killed with -9 on the way."""

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.backends.ray.procs import Watched, command_line, group_members
from runtime.rl.ledger.audit import audit
from tests.live import LiveRun, by_role, identity_holds, journal_disagreements, steps

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.kill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (docs/gpu.md)"),
]
WAIT_S = 300.0  # vLLM imports for half a minute on two busy cores
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
CONFIG = """
[run]
name = "vllm-tiny"
[model]
source = "seeded"
path = "model"
tokenizer = "builtin:chars"
[task]
source = "copy"
reward = "match"
[algorithm]
eta = 2
prompts_per_step = 4
responses_per_prompt = 4
[sampling]
max_new_tokens = 10
max_running = 16
[rollout]
engine = "vllm"
[lengths]
prompt_mean = 10
prompt_max = 12
response_mean = 8
[fleet]
source = "cpu"
"""


@pytest.fixture(params=["store", "direct"])
def run(request: pytest.FixtureRequest, ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "vllm.toml").write_text(CONFIG + f'[weights]\npath = "{request.param}"\n')
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def engine_group(replica: int) -> int:
    """The process group of the engine that belongs to a replica's process, found by its warden's command line."""
    for entry in os.scandir("/proc"):
        line = command_line(int(entry.name)) if entry.name.isdigit() else ""
        if "vllm_host.warden" in line and f" {replica} " in line:
            return int(entry.name)
    raise AssertionError(f"replica {replica} has no engine")


def test_a_run_generates_with_vllm_and_outlives_its_replica(run: LiveRun) -> None:
    run.start(run.folder / "vllm.toml")
    s = run.until(lambda s: steps(s) >= 2, "two steps", deadline_s=WAIT_S)
    assert identity_holds(s)
    victim = by_role(s, "rollout")[0]
    assert victim.pid is not None
    engine = group_members(engine_group(victim.pid))
    assert len(engine) >= 2
    with Watched(engine) as watched:
        os.kill(victim.pid, signal.SIGKILL)
        assert watched.wait(10.0) == ()  # nothing of vLLM is left, long before the daemon looks
    before = steps(s)
    s = run.until(
        lambda s: steps(s) >= before + 2 and any(d.pid not in (None, victim.pid) for d in by_role(s, "rollout")),
        "steps with a new engine",
        deadline_s=WAIT_S,
    )
    assert identity_holds(s)
    replica = by_role(s, "rollout")[0].pid
    assert replica is not None
    engine = group_members(engine_group(replica))
    done = run.cli("down", "--run", run.info.id, deadline_s=90)
    assert done.returncode == 0, done.stderr
    assert run.end(120) == 0
    with Watched(engine) as watched:
        assert watched.wait(10.0) == ()
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=2) == []
    metrics = run.metrics()
    assert max(m["staleness_max"] for m in metrics) <= 2
    plain = [m for m in metrics if "engine_step_s" in m]
    assert plain, "of ten steps of a sample some only decode"
    assert all(0 < m["engine_host_s"] <= 1.1 * m["engine_step_s"] < 60 for m in plain)
    if 'path = "direct"' in (run.folder / "vllm.toml").read_text():
        assert any(m.get("direct_members") for m in metrics), "weights went straight to the engine"
    # float32 on both sides: engine and trainer agree on every token that the same weights sampled and trained
    assert max(m["engine_trainer_logprob_diff"] for m in metrics if "engine_trainer_logprob_diff" in m) < 1e-3
