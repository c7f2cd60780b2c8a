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
from runtime.rl.engine.vllm_host.memory import card_memory

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


def memory(card_gb: float, **changes: Any) -> dict[str, Any]:
    """What an engine of SmolLM2-135M's shape is told on a card of that size."""
    spec = {
        "model": json.loads((MODELS / "smollm2-135m.json").read_text()),
        "device": "cuda",
        "dtype": "bfloat16",
        "slots": 256,
        "max_length": 4096,
        "gpu_memory_share": 0.85,
        "card_part": 1.0,
        "second_buffer": True,
    }
    return card_memory({**spec, **changes}, lambda: int(card_gb * 1e9))


def test_a_whole_card_leaves_room_for_the_second_buffer() -> None:
    """269 MB of weights and 4 GiB: of 16 GB that is more than the 15 % left by the share, of 40 GB it is not."""
    assert memory(40) == {"gpu_memory_utilization": 0.85}
    assert memory(80)["gpu_memory_utilization"] == 0.85
    assert memory(16)["gpu_memory_utilization"] == pytest.approx(1 - (0.269 + 4.295) / 16, abs=1e-3)
    assert memory(16, second_buffer=False) == {"gpu_memory_utilization": 0.85}
    assert memory(16, device="cpu") == {"gpu_memory_utilization": 0.85}


def test_a_cache_that_no_slot_can_fill_is_not_taken() -> None:
    """256 sequences of 600 tokens of 23,040 bytes, in ten blocks of 64, and one block are 3.8 GB: less than half of what 80 GB leave,
    more than half of what 11 GB do (0.585 of it, by the second buffer's room, is 6.4 GB, less 4.6 GB)."""
    assert memory(80, max_length=600)["kv_cache_memory_bytes"] == (256 * 640 + 64) * 23_040
    assert memory(80, max_length=600)["gpu_memory_utilization"] == 0.85
    assert memory(80, max_length=600, second_buffer=False)["kv_cache_memory_bytes"] == (256 * 640 + 64) * 23_040
    assert "kv_cache_memory_bytes" not in memory(11, max_length=600)


def test_on_a_part_the_kv_cache_is_told() -> None:
    """Half of 140 GB: 0.85 x 70 = 59.5 GB less weights and 4 GiB leaves 54.9 GB; 256 sequences of 4,096 tokens of 23,040 bytes
    are 24.2 GB, so no more is taken. Half of 40 GB gives what there is."""
    told = memory(140, card_part=0.5)
    assert told["gpu_memory_utilization"] == pytest.approx(0.425)
    assert told["kv_cache_memory_bytes"] == (256 * 4096 + 64) * (2 * 30 * 3 * 64 * 2)
    # 1 - (0.269 + 4.295) / 20 of 20 GB, less as much again
    assert memory(40, card_part=0.5)["kv_cache_memory_bytes"] == pytest.approx(
        20e9 - 2 * (0.269e9 + 4 * 2**30), rel=1e-3
    )
    with pytest.raises(ConfigError, match="does not fit"):
        memory(16, card_part=0.5)
