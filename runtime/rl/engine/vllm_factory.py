"""The vLLM engine of a run's configuration. Imports no vllm: the engine's own process does."""

import hashlib
import importlib.util

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.engine.factory import check_vocabulary, compute_dtype
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.model import load_config
from runtime.rl.tokenizer import load_tokenizer

ROOM = 4096  # positions offered beyond what the configuration counts on, where the model has them


def vllm_spec(config: Config, *, gpus: int, threads: int, incarnation: str, card_part: float = 1.0) -> VllmSpec:
    """What the engine is told. `gpus`: of the replica, 0 for a CPU; they become its tensor parallel degree. `card_part`: of each
    card's memory.

    Raises ConfigError when model, tokenizer and devices do not fit each other.
    """
    model, rollout = config.model, config.rollout
    decoder = load_config(model.path)
    tokenizer = load_tokenizer(model.tokenizer, model.path.parent)
    check_vocabulary(decoder, tokenizer, where=str(model.path))
    tp = max(1, gpus)
    even = decoder.heads % tp == 0 and decoder.intermediate % tp == 0
    if tp > rollout.max_tp or not even or (decoder.kv_heads % tp and tp % decoder.kv_heads):
        raise ConfigError(
            "the model cannot be split over so many devices",
            got=tp,
            expected=f"at most rollout.max_tp = {rollout.max_tp}, and heads and MLP in equal parts",
        )
    cpu = gpus == 0
    longest = config.lengths.prompt_max + config.sampling.max_new_tokens
    return VllmSpec(
        model=decoder.to_hf(),
        slots=config.sampling.max_running,
        max_length=min(decoder.max_positions, max(longest, ROOM)),
        eos_ids=tokenizer.eos_ids,
        seed=_seed(config.run.seed, incarnation),
        temperature=config.sampling.temperature,
        dtype=compute_dtype(model.rollout_dtype or model.dtype, "cpu" if cpu else "cuda"),
        device="cpu" if cpu else "cuda",
        tp=tp,
        max_tp=rollout.max_tp,
        kv_on_update=config.algorithm.kv_on_update,
        gpu_memory_share=rollout.gpu_memory_share,
        card_part=card_part,
        kv_cache_bytes=rollout.kv_cache,
        batched_tokens=rollout.batched_tokens,
        threads=threads,
        eager=cpu if rollout.eager is None else rollout.eager,
        second_buffer=config.weights.path != "store",
        start_s=rollout.start_deadline,
        token_s=rollout.token_deadline,
    )


def build_vllm_engine(
    config: Config, *, gpus: int = 0, threads: int = 1, incarnation: str = "0", card_part: float = 1.0
) -> VllmEngine:
    """An engine without weights: the first generation brings them. Returns when it has sampled a token of random ones.

    `incarnation` names the replica and its epoch: each draws samples of its own.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vllm is not installed", where="rollout.engine", got="vllm", hint='pip install "hexctl[run,vllm]"'
        )
    return VllmEngine(vllm_spec(config, gpus=gpus, threads=threads, incarnation=incarnation, card_part=card_part))


def _seed(run_seed: int, incarnation: str) -> int:
    """Below 2^31, as vLLM wants it."""
    digest = hashlib.sha256(f"{run_seed}/{incarnation}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
