"""The torch engine of a run's configuration. Importing this module imports torch."""

import torch

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.engine.spec import PREFILL_TOKENS, EngineSpec
from runtime.rl.engine.torch_engine import ReadGeneration, TorchEngine
from runtime.rl.model import DTYPES, DecoderConfig, load_config
from runtime.rl.tokenizer import Tokenizer, load_tokenizer
from runtime.rl.weights import ChainReader

CPU_KV_BYTES = 2**30
CPU_STEP_FLOP = (
    3e11  # one engine step's prefill on a CPU: a few seconds on a core, so that flow hears of a replica in time
)
CUDA_KV_SHARE = 0.7  # of the memory left after the weights


def build_engine(config: Config, *, device: str = "cpu", read: ReadGeneration | None = None) -> TorchEngine:
    """An engine without weights: the first generation brings them. Paths of `config` must be resolved.

    Raises ConfigError when model and tokenizer do not fit each other.
    """
    model = config.model
    decoder = load_config(model.path, scale_logits=_scale_logits(config))
    tokenizer = load_tokenizer(model.tokenizer, model.path.parent)
    check_vocabulary(decoder, tokenizer, where=str(model.path))
    dtype = compute_dtype(model.rollout_dtype or model.dtype, device)
    slots = config.sampling.max_running
    longest = config.lengths.prompt_max + config.sampling.max_new_tokens
    spec = EngineSpec(
        slots=slots,
        max_length=decoder.max_positions,
        kv_tokens=min(slots * longest, _kv_budget_tokens(decoder, dtype, device)),
        eos_ids=tokenizer.eos_ids,
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        dtype=dtype,
        device=device,
        prefill_tokens=_prefill_tokens(decoder, device),
    )
    return TorchEngine(decoder, spec, read or ChainReader())


def check_vocabulary(decoder: DecoderConfig, tokenizer: Tokenizer, *, where: str) -> None:
    """Raises ConfigError when the tokenizer has ids the model has no row for."""
    if tokenizer.vocab_size > decoder.vocab:
        raise ConfigError(
            "the model's vocabulary is smaller than the tokenizer's",
            where=where,
            got=decoder.vocab,
            expected=f"at least {tokenizer.vocab_size}",
        )


def _scale_logits(config: Config) -> bool | None:
    """The run's option for seeded models; a saved model says so itself."""
    return config.model.scale_logits if config.model.source == "seeded" else None


def compute_dtype(dtype: str, device: str) -> str:
    """A CPU computes bfloat16 weights in float32: exact, and without matrix instructions for bfloat16 some seven times
    faster at prefill (measured on AVX2)."""
    return "float32" if dtype == "bfloat16" and device == "cpu" else dtype


def _prefill_tokens(decoder: DecoderConfig, device: str) -> int:
    """Padded tokens that one step may prefill."""
    if device.startswith("cuda"):
        return PREFILL_TOKENS
    return max(256, min(PREFILL_TOKENS, int(CPU_STEP_FLOP / (2 * _parameters(decoder)))))


def _kv_budget_tokens(decoder: DecoderConfig, dtype: str, device: str) -> int:
    """Positions the KV cache may hold on `device`."""
    budget = float(CPU_KV_BYTES)
    if device.startswith("cuda"):
        free, whole = torch.cuda.mem_get_info(torch.device(device))
        mine = min(free, whole * torch.cuda.get_per_process_memory_fraction(torch.device(device)))
        budget = CUDA_KV_SHARE * max(0.0, mine - _parameter_bytes(decoder, dtype))
    per_token = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * DTYPES[dtype].itemsize
    return max(1, int(budget / per_token))


def _parameter_bytes(decoder: DecoderConfig, dtype: str) -> int:
    return _parameters(decoder) * DTYPES[dtype].itemsize


def _parameters(decoder: DecoderConfig) -> int:
    query, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    layer = decoder.hidden * (2 * query + 2 * kv + 3 * decoder.intermediate)
    return decoder.layers * layer + 2 * decoder.vocab * decoder.hidden
