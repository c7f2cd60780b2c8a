"""What the vLLM engine is told by a configuration; no vllm is needed to tell it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.model import load_model_spec
from runtime.config.load import load_config, need_runnable
from runtime.config.problem import problem_from_config
from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.engine.vllm_factory import build_vllm_engine, vllm_spec

MODELS = Path(__file__).parents[2] / "configs" / "models"
TEXT = """
[model]
source = "seeded"
path = "{models}/tiny-qwen3"
rollout_dtype = "{dtype}"
{more}
[task]
source = "copy"
[rollout]
engine = "vllm"
[algorithm]
kv_on_update = "{kv}"
[fleet]
source = "cpu"
"""


def config(model: str = "tiny-qwen3", **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": 5},
            "model": {"source": "seeded", "path": MODELS / model, "rollout_dtype": "bfloat16"},
            "sampling": {"temperature": 0.8, "max_new_tokens": 6, "max_running": 4},
            "lengths": {"prompt_mean": 8, "prompt_max": 10, "response_mean": 5},
            "rollout": {"engine": "vllm", **rollout},
        }
    )


def test_limits_come_from_the_configuration() -> None:
    spec = vllm_spec(config(token_deadline="9 s", kv_cache="3 GB"), gpus=0, threads=2, incarnation="r0/1")
    assert (spec.slots, spec.dtype, spec.temperature, spec.eos_ids) == (
        4,
        "float32",
        0.8,
        {1},
    )  # exact, and faster on a CPU
    assert (spec.device, spec.tp, spec.threads, spec.eager) == ("cpu", 1, 2, True)
    assert (spec.token_s, spec.kv_cache_bytes, spec.max_length) == (9.0, 3e9, 128)
    told = json.loads(json.dumps(spec.plain()))
    assert told["model"]["architectures"] == ["Qwen3ForCausalLM"]
    assert told["eos_ids"] == [1]


def test_no_two_incarnations_draw_the_same_samples() -> None:
    seeds = {vllm_spec(config(), gpus=0, threads=1, incarnation=f"r{r}/{e}").seed for r in range(20) for e in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**31 for s in seeds)
    again = vllm_spec(config(), gpus=0, threads=1, incarnation="r3/7").seed
    assert again in seeds


def test_a_replicas_gpus_are_its_tensor_parallel_degree_within_the_limit() -> None:
    qwen = config("qwen2.5-7b.json", max_tp=4)
    spec = vllm_spec(qwen, gpus=4, threads=1, incarnation="r0/1")
    assert (spec.device, spec.tp, spec.max_tp, spec.eager, spec.dtype) == ("cuda", 4, 4, False, "bfloat16")
    for gpus in (3, 8):  # does not divide 28 heads; over the limit
        with pytest.raises(ConfigError, match="split"):
            vllm_spec(qwen, gpus=gpus, threads=1, incarnation="r0/1")


@pytest.mark.parametrize(("engine", "wanted"), [("vllm", 4), ("torch", 1)])
def test_the_planner_is_told_the_limit(engine: str, wanted: int) -> None:
    kind = DeviceKind(name="x", peak_flops=1e15, hbm_bytes_per_s=3e12, memory_bytes=8e10, link_bytes_per_s=1e11)
    link = Link(latency_s=1e-5, bytes_per_s=1e10)
    cluster = Cluster(
        kinds={"x": kind}, devices=(Device(id="a", kind="x", node="n0"),), same_kind=link, cross_kind=link
    )
    given = config(max_tp=4).model_copy(update={"rollout": config(max_tp=4, engine=engine).rollout})
    problem = problem_from_config(given, cluster, load_model_spec(MODELS / "qwen2.5-7b.json"))
    assert problem.capabilities.rollout_max_tp == wanted


@pytest.mark.parametrize(
    ("dtype", "more", "words"),
    [("float64", "", "no such dtype"), ("bfloat16", "scale_logits = true", "scales no logits")],
)
def test_what_only_the_torch_engine_computes_is_refused_by_file_and_line(
    tmp_path: Path, dtype: str, more: str, words: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(TEXT.format(models=MODELS, dtype=dtype, more=more, kv="recompute"))
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file)
    assert "c.toml:" in str(caught.value)


def test_keep_runs_with_vllm_only(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    text = TEXT.format(models=MODELS, dtype="float32", more="", kv="keep")
    file.write_text(text)
    need_runnable(load_config(file))
    file.write_text(text.replace('"vllm"', '"torch"'))
    with pytest.raises(ConfigError, match="kv_on_update"):
        need_runnable(load_config(file))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_the_package_the_engine_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        build_vllm_engine(config())
    assert "hexctl[run,vllm]" in caught.value.hint
