"""Device kinds with the source of every figure.

Peaks are dense bf16 from datasheets; prices are one example of a catalogue price (USD an hour and device, on demand)
and are meant to be overridden by `fleet.prices`. Kinds without a price have None, never 0.
"""

from collections.abc import Mapping
from types import MappingProxyType

from planner.cluster import DeviceKind
from planner.errors import UnknownName

_AIC = "peak, HBM, memory and link: ai-dynamo/aiconfigurator systems/*.yaml (vendor sheets)"
_HEX = "AReaL-Hex (arXiv 2511.00796), set-up section, as printed; memory from vendor sheets; price: ratio to L20 as $"


def _kind(
    name: str,
    *,
    tflops: float,
    hbm_gb_per_s: float,
    memory_gb: float,
    link_gb_per_s: float,
    usd: float | None = None,
    source: str,
) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_flops=tflops * 1e12,
        hbm_bytes_per_s=hbm_gb_per_s * 1e9,
        memory_bytes=memory_gb * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        price_usd_per_h=usd,
        source=source,
    )


_KINDS = (
    _kind(
        "H800", tflops=756, hbm_gb_per_s=2000, memory_gb=80, link_gb_per_s=200, usd=5.28,
        source=_HEX + "; other catalogues give 989 TFLOP/s and 3.35 TB/s",
    ),
    _kind("H20", tflops=148, hbm_gb_per_s=4000, memory_gb=96, link_gb_per_s=450, usd=1.85, source=_HEX),
    _kind(
        "A100-40", tflops=312, hbm_gb_per_s=1555, memory_gb=42.9, link_gb_per_s=300, usd=4.0966,
        source="NVIDIA A100 40 GB sheet (HetRL prints the 80 GB part's 2039 GB/s); price AWS p4d us-east-1",
    ),
    _kind(
        "A100-80", tflops=312, hbm_gb_per_s=2039, memory_gb=85.9, link_gb_per_s=300, usd=5.1207,
        source=_AIC + ", a100_sxm; price AWS p4de us-east-1",
    ),
    _kind(
        "A100-80-PCIe", tflops=312, hbm_gb_per_s=1935, memory_gb=85.9, link_gb_per_s=32, usd=1.64,
        source=_AIC + ", a100_pcie; price RunPod secure",
    ),
    _kind(
        "H100", tflops=989, hbm_gb_per_s=3350, memory_gb=85.9, link_gb_per_s=450, usd=2.95,
        source=_AIC + ", h100_sxm; price Nebius",
    ),
    _kind(
        "H100-PCIe", tflops=756.5, hbm_gb_per_s=2000, memory_gb=85.9, link_gb_per_s=64, source=_AIC + ", h100_pcie"
    ),
    _kind(
        "H200", tflops=989, hbm_gb_per_s=4800, memory_gb=151.4, link_gb_per_s=450, usd=3.5,
        source=_AIC + ", h200_sxm; price Nebius",
    ),
    _kind(
        "B200", tflops=2250, hbm_gb_per_s=7700, memory_gb=193.3, link_gb_per_s=900, usd=5.5,
        source=_AIC + ", b200_sxm; price Nebius",
    ),
    _kind(
        "L40S", tflops=362.05, hbm_gb_per_s=864, memory_gb=48.3, link_gb_per_s=32, usd=1.5484,
        source=_AIC + ", l40s (measured collectives at 8 GPUs are far slower: 1.4 GB/s); price Nebius",
    ),
    _kind(
        "L4", tflops=121, hbm_gb_per_s=300, memory_gb=25.8, link_gb_per_s=32, usd=0.56,
        source=_AIC + ", l4; price GCP g2 us-central1, GPU part",
    ),
    _kind("A30", tflops=165, hbm_gb_per_s=933, memory_gb=25.8, link_gb_per_s=32, source=_AIC + ", a30"),
    _kind(
        "A10G", tflops=70, hbm_gb_per_s=600, memory_gb=24, link_gb_per_s=32, usd=1.01,
        source="AWS g5 instance page (70 TFLOP/s tensor, 600 GB/s); price: Melange example",
    ),
    _kind(
        "A6000", tflops=154.8, hbm_gb_per_s=768, memory_gb=48, link_gb_per_s=32, usd=0.8,
        source="NVIDIA RTX A6000 sheet (half of the 309.7 TFLOP/s with sparsity); price Lambda",
    ),
    _kind(
        "RTX-PRO-6000", tflops=467.8, hbm_gb_per_s=1792, memory_gb=102.6, link_gb_per_s=64,
        source=_AIC + ", rtx_pro_6000_server",
    ),
    _kind(
        "RTX-4090", tflops=165.2, hbm_gb_per_s=1008, memory_gb=24, link_gb_per_s=32,
        source="NVIDIA Ada whitepaper (bf16, fp32 accumulate), PCIe 4.0 x16",
    ),
    _kind(
        "RTX-3090", tflops=71.2, hbm_gb_per_s=936, memory_gb=24, link_gb_per_s=32,
        source="NVIDIA GA102 whitepaper (bf16, fp32 accumulate), PCIe 4.0 x16",
    ),
    _kind(
        "V100-16", tflops=125, hbm_gb_per_s=900, memory_gb=16, link_gb_per_s=150, usd=3.823,
        source="NVIDIA V100 sheet (fp16: it has no bf16); price AWS p3 eu-central-1",
    ),
    _kind(
        "T4", tflops=65, hbm_gb_per_s=320, memory_gb=16, link_gb_per_s=16, usd=0.35,
        source="NVIDIA T4 sheet (fp16: it has no bf16); price GCP, GPU part",
    ),
    DeviceKind(
        name="host-cpu",
        peak_flops=4e10,
        hbm_bytes_per_s=1e10,
        memory_bytes=4e9,
        link_bytes_per_s=5e9,
        launch_s=5e-4,
        source="assumption: two laptop cores in fp32 with eager kernels; not measured on this machine",
    ),
)  # fmt: skip

CATALOGUE: Mapping[str, DeviceKind] = MappingProxyType({k.name: k for k in _KINDS})


def device_kind(name: str) -> DeviceKind:
    """The kind of that name; UnknownName where the catalogue has none."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownName(
            "no such device kind",
            where="catalogue",
            got=name,
            expected=", ".join(CATALOGUE),
            hint="declare it under [fleet.kinds.<name>] with peak_flops, hbm, memory and link",
        ) from None
