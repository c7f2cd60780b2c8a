"""Large fleets made in code: five kinds of the catalogue in machines of eight, in one region or over ten.

The workload is that of `configs/areal-hex-56.toml`, the model a 7B; links inside a region are the paper's. Latency and
bandwidth between regions are assumptions, drawn from a fixed seed: 5-150 ms, 0.1-0.6 GB/s.
"""

import itertools
import random
from pathlib import Path

from planner.catalogue import device_kind
from planner.cluster import Cluster, Device, Link
from planner.model import load_model_spec
from planner.problem import Problem
from planner.workload import Lengths, Workload

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
KINDS = ("H800", "H20", "A100-80", "L40S", "L4")
PER_MACHINE = 8


def large_workload() -> Workload:
    """512 prompts x 16 answers of 4,000 tokens on average, as in the configuration of 56 GPUs."""
    return Workload(
        prompts_per_step=512,
        responses_per_prompt=16,
        prompt=Lengths(mean_tokens=256, max_tokens=1024),
        response=Lengths(mean_tokens=4000, cv=0.8, max_tokens=27648),
        eta=4,
        proximal_forward=True,
    )


def large_cluster(devices: int, *, regions: int = 1, seed: int = 7) -> Cluster:
    """`devices` GPUs in machines of eight; kinds and then regions take turns."""
    dice = random.Random(seed)
    links = {
        (f"r{a}", f"r{b}"): Link(latency_s=dice.uniform(5e-3, 150e-3), bytes_per_s=dice.uniform(1e8, 6e8))
        for a, b in itertools.combinations(range(regions), 2)
    }
    found = []
    for m in range(devices // PER_MACHINE):
        kind, region = KINDS[m % len(KINDS)], f"r{m // len(KINDS) % regions}"
        found += [
            Device(id=f"n{m}/gpu{i}", kind=kind, node=f"n{m}", region=region, index=i) for i in range(PER_MACHINE)
        ]
    return Cluster(
        kinds={k: device_kind(k) for k in KINDS},
        devices=tuple(found),
        same_kind=Link(latency_s=1e-5, bytes_per_s=5e9),
        cross_kind=Link(latency_s=1e-5, bytes_per_s=1.5e9),
        regions=links,
    )


def large_problem(devices: int, *, regions: int = 1, seed: int = 7) -> Problem:
    """That fleet with the 7B model."""
    return Problem(
        cluster=large_cluster(devices, regions=regions, seed=seed),
        model=load_model_spec(MODELS / "r1-distill-qwen-7b.json"),
        workload=large_workload(),
    )
