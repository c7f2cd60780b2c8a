"""The thinned sample of the raw tables that the tests carry, so that the gate works without the raw folder."""

import csv
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

Row = Mapping[str, str]
WHOLE = (
    "aic_gpu_specs.csv",
    "llmfoundry_train_throughput.csv",
    "sailor_iteration_times.csv",
    "verl_async_step_times.csv",
)


def _one_of(column: str, values: set[int]) -> Callable[[Row], bool]:
    return lambda r: int(r[column]) in values


def _power_of_two(column: str, every: int = 1) -> Callable[[Row], bool]:
    def keep(r: Row) -> bool:
        value = int(r[column])
        return value & (value - 1) == 0 and value.bit_length() % every == 0

    return keep


_N, _KV, _BATCH = {1024, 4096, 12288}, {1, 8}, {1, 16, 256}
KEPT: Mapping[str, tuple[Callable[[Row], bool], ...]] = {
    "aic_gemm_bf16.csv": (_one_of("n", _N), _one_of("k", _N)),
    "aic_gemm_fp8.csv": (_one_of("n", _N), _one_of("k", _N)),
    "aic_attention_generation.csv": (
        _one_of("num_key_value_heads", _KV),
        _one_of("batch_size", _BATCH),
        lambda r: int(r["num_heads"]) // int(r["num_key_value_heads"]) in (1, 8) and int(r["step"]) > 100,
    ),
    "aic_attention_context.csv": (
        _one_of("batch_size", _BATCH),
        _one_of("num_heads", {1, 8, 64}),
        _one_of("isl", {128, 1024, 2048, 8192}),
        lambda r: r["num_heads"] == r["num_key_value_heads"],
    ),
    "aic_nccl.csv": (_power_of_two("message_bytes", 2), lambda r: r["op_name"] in ("all_reduce", "all_gather", "reduce_scatter")),
    "aic_custom_allreduce.csv": (_power_of_two("message_size", 2), lambda r: r["kernel_source"].endswith("graph")),
    "aic_e2e_serving_agg.csv": (
        lambda r: r["backend"] == "vllm" and "Llama-3.1-70B" in r["model_path"] and r["system"] in ("h100_sxm", "h200_sxm"),
    ),
    "sailor_layer_times.csv": (
        lambda r: r["model"] in ("OPT-350", "GPT-Neo-2.7") and r["gpu"] in ("GH-96", "RTX-3090", "RTX-2080", "Titan-RTX"),
    ),
    "sailor_network_fit.csv": (lambda r: r["scope"] == "inter" and r["src_zone"] == r["dst_zone"],),
}  # fmt: skip


def write(raw: Path, to: Path) -> int:
    """Write the sample; the bytes it takes."""
    to.mkdir(parents=True, exist_ok=True)
    for name in WHOLE:
        shutil.copyfile(raw / name, to / name)
    shutil.copyfile(raw.parent / "papers" / "areal_hex_latency.csv", to / "areal_hex_latency.csv")
    for name, tests in KEPT.items():
        with (raw / name).open(newline="") as source, (to / name).open("w", newline="") as target:
            reader = csv.DictReader(source)
            out = csv.DictWriter(target, reader.fieldnames or (), lineterminator="\n")
            out.writeheader()
            out.writerows(r for r in reader if all(test(r) for test in tests))
    for path in to.iterdir():
        path.chmod(0o644)
    return sum(p.stat().st_size for p in to.iterdir())
