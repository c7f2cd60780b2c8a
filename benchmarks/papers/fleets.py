"""The papers' fleets and workloads as problems, and the inputs they do not print as values to sweep."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from planner.catalogue import device_kind
from planner.cluster import Device, DeviceKind
from planner.cost.assumptions import Assumptions
from planner.model import ModelSpec, load_model_spec
from planner.override import Override
from planner.problem import Problem
from planner.record import record, replace
from planner.workload import Algorithm, KvOnUpdate, Lengths, Mode, UpdateMode
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHAPES = {
    "1.5B": "r1-distill-qwen-1.5b", "7B": "r1-distill-qwen-7b", "14B": "r1-distill-qwen-14b",
    "4B": "qwen3-4b", "8B": "qwen3-8b", "Q14B": "qwen3-14b",
}  # fmt: skip
PER_NODE = 8
# The paper's links and fixed seconds of a weight update are among what is to be predicted, and the cost model's own constants for
# it come from there. First principles have the share of a link that any large transfer reaches, and no fixed part.
FIRST_PRINCIPLES = replace(Assumptions(), update_efficiency=Assumptions().link_efficiency, update_fixed_s=0.0)

Sheet = Literal["756/2.0", "989/3.35"]
SHEETS: Mapping[Sheet, tuple[float, float]] = {"756/2.0": (756e12, 2.0e12), "989/3.35": (989e12, 3.35e12)}


@record
class Inputs:
    """What AReaL-Hex leaves open."""

    response_mean: float = 4000.0  # tokens
    response_cv: float = 0.8
    prompts: int = 512  # a step
    eta: int = 4
    sheet: Sheet = "756/2.0"  # of the H800: TFLOP/s and TB/s, as printed or as others print it
    cap: int | None = None  # samples a replica decodes at once; None: as many as memory allows
    update: UpdateMode = "pause"  # step = max(infer, train) + sync is the paper's own arithmetic
    kv: KvOnUpdate = "recompute"

    def text(self) -> str:
        """In a few words."""
        cap = "no cap" if self.cap is None else f"cap {self.cap}"
        return f"{self.response_mean:,.0f} tokens, H800 {self.sheet}, {cap}"


BASE = Inputs()
LENGTHS, CAPS = (300.0, 1000.0, 4000.0, 14000.0), (64, None)


def sweep() -> tuple[Inputs, ...]:
    """The whole grid of length, sheet and cap, and the others one at a time around the shipped assumptions."""
    grid = [replace(BASE, response_mean=m, sheet=s, cap=c) for m in LENGTHS for s in SHEETS for c in CAPS]
    others = [
        replace(BASE, response_cv=0.3),
        replace(BASE, response_cv=1.2),
        replace(BASE, eta=1),
        replace(BASE, eta=8),
        replace(BASE, prompts=128),
        replace(BASE, update="rolling"),
        replace(BASE, kv="keep"),
    ]
    return (*grid, *others)


_SHIPPED: dict[str, Problem] = {}
_MODELS: dict[str, ModelSpec] = {}


def shipped(name: str) -> Problem:
    """The problem of configs/<name>.toml; read once."""
    if name not in _SHIPPED:
        config = load_config(CONFIGS / f"{name}.toml").config
        spec = load_model_spec(config.model.path)
        _SHIPPED[name] = problem_from_config(config, cluster_from_config(config), spec)
    return _SHIPPED[name]


def model_spec(size: str) -> ModelSpec:
    """The shape of a model by its size; "Q14B" is HetRL's 14B."""
    if size not in _MODELS:
        _MODELS[size] = load_model_spec(CONFIGS / "models" / f"{SHAPES[size]}.json")
    return _MODELS[size]


@functools.cache
def areal_hex(model: str, h800: int, h20: int, inputs: Inputs, *, halves: bool = False) -> Problem:
    """That many GPUs in machines of eight. `halves`: half of them, in order, must train and the others must generate.

    H800 and H20 are as the paper prints them but for the sheet; no efficiency is taken from its measurements.
    """
    base = shipped("areal-hex-24")
    peak, hbm = SHEETS[inputs.sheet]
    kinds: dict[str, DeviceKind] = {
        "H800": replace(device_kind("H800"), peak_flops=peak, hbm_bytes_per_s=hbm),
        "H20": device_kind("H20"),
    }
    devices = tuple(
        Device(id=f"{kind}-{i}", kind=kind, node=f"{kind}-{i // PER_NODE}", index=i % PER_NODE)
        for kind, n in (("H800", h800), ("H20", h20))
        for i in range(n)
    )
    workload = replace(
        base.workload,
        prompts_per_step=inputs.prompts,
        response=Lengths(
            mean_tokens=inputs.response_mean,
            cv=inputs.response_cv,
            max_tokens=base.workload.response.max_tokens,
        ),
        eta=inputs.eta,
        update_mode=inputs.update,
        kv_on_update=inputs.kv,
    )
    train = len(devices) // 2
    pins = tuple(
        Override(device=d.id, kind="pin", role="train" if i < train else "rollout") for i, d in enumerate(devices)
    )
    return replace(
        base,
        cluster=replace(base.cluster, kinds=kinds, devices=devices),
        model=model_spec(model),
        workload=workload,
        capabilities=replace(base.capabilities, rollout_max_running=inputs.cap),
        overrides=pins if halves else (),
    )


SCENARIOS = ("S1", "S2", "S3", "S4")
HETRL_MODELS = ("4B", "8B", "Q14B")
ALGORITHMS: tuple[Algorithm, ...] = ("ppo", "grpo")
MODES: tuple[Mode, ...] = ("sync", "async")
ETA = 4  # of async runs: an assumption of the shipped files, HetRL prints none


def hetrl(scenario: str, model: str, algorithm: Algorithm, mode: Mode, *, only: str | None = None) -> Problem:
    """One of HetRL's runs on its 64 GPUs, or on those of the kind `only`."""
    base = shipped(f"hetrl-{scenario.lower()}")
    devices = tuple(d for d in base.cluster.devices if only is None or d.kind == only)
    return replace(
        base,
        cluster=replace(base.cluster, devices=devices),
        model=model_spec(model),
        workload=replace(base.workload, algorithm=algorithm, mode=mode, eta=ETA if mode == "async" else 0),
    )
