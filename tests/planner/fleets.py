"""Small problems for the planner's tests: hypothesis strategies and hand-made fleets."""

from hypothesis import strategies as st

from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.model import ModelSpec
from planner.override import Override
from planner.problem import Capabilities, Problem
from planner.record import replace
from planner.workload import Lengths, Workload

SMALL = ModelSpec(
    name="half-billion", hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936,
    tied=True, qkv_bias=True,
)  # fmt: skip
TINY = ModelSpec(
    name="tiny", hidden=64, intermediate=192, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=32, tied=True,
    dtype_bytes=4,
)  # fmt: skip
LINK = Link(latency_s=1e-5, bytes_per_s=5e9)
SLOW = Link(latency_s=1e-4, bytes_per_s=1.5e9)


def kind(
    name: str, *, tflops: float = 300.0, hbm: float = 2e12, memory: float = 80e9, link: float = 2e11,
    usd: float | None = None, paced: bool = False, launch_s: float = 2e-5, train_floor_s: float = 0.0,
    train_fixed_s: float = 0.0,
) -> DeviceKind:  # fmt: skip
    """A device kind with round figures."""
    return DeviceKind(
        name=name, peak_flops=tflops * 1e12, hbm_bytes_per_s=hbm, memory_bytes=memory, link_bytes_per_s=link,
        price_usd_per_h=usd, paced=paced, launch_s=launch_s, train_floor_s=train_floor_s, train_fixed_s=train_fixed_s,
    )  # fmt: skip


def cluster(*devices: tuple[str, str], kinds: tuple[DeviceKind, ...], cross: Link = SLOW) -> Cluster:
    """Devices by (kind, node), called d0, d1, ..."""
    return Cluster(
        kinds={k.name: k for k in kinds},
        devices=tuple(Device(id=f"d{i}", kind=k, node=n, index=i) for i, (k, n) in enumerate(devices)),
        same_kind=LINK,
        cross_kind=cross,
    )


def workload(**changes: object) -> Workload:
    """64 samples of about 500 tokens."""
    values: dict[str, object] = {
        "prompts_per_step": 16,
        "responses_per_prompt": 4,
        "prompt": Lengths(mean_tokens=100, max_tokens=200),
        "response": Lengths(mean_tokens=400, cv=0.6, max_tokens=2000),
        **changes,
    }
    return Workload(**values)  # type: ignore[arg-type]


COMPUTE, BANDWIDTH = kind("compute", tflops=800, hbm=1e12, usd=5.0), kind("bandwidth", tflops=100, hbm=4e12, usd=2.0)
MIXED = cluster(("compute", "a"), ("compute", "a"), ("bandwidth", "b"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))

FLEET_OF_FIVE = cluster(("compute", "a"), ("compute", "a"), *[("bandwidth", "b")] * 3, kinds=(COMPUTE, BANDWIDTH))


def problem(at: Cluster = MIXED, **changes: object) -> Problem:
    """The mixed fleet of four unless told otherwise."""
    values: dict[str, object] = {"cluster": at, "model": SMALL, "workload": workload(), **changes}
    return Problem(**values)  # type: ignore[arg-type]


@st.composite
def kinds(draw: st.DrawFn, name: str) -> DeviceKind:
    """GPU-like, from a small card to a large one."""
    return kind(
        name,
        tflops=draw(st.sampled_from([60.0, 148.0, 300.0, 989.0])),
        hbm=draw(st.sampled_from([3e11, 1e12, 4e12])),
        memory=draw(st.sampled_from([12e9, 24e9, 80e9])),
        link=draw(st.sampled_from([2e10, 2e11])),
        usd=draw(st.sampled_from([0.5, 1.85, 5.28])),
        train_floor_s=draw(st.sampled_from([0.0, 0.0, 1e-3, 0.05])),
        train_fixed_s=draw(st.sampled_from([0.0, 0.0, 0.1])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """All modes; batches and lengths small enough that every term can bind."""
    mean = draw(st.sampled_from([50.0, 400.0, 1500.0]))
    return workload(
        mode=draw(st.sampled_from(["async", "async", "sync"])),
        eta=draw(st.sampled_from([0, 1, 4])),
        prompts_per_step=draw(st.sampled_from([1, 8, 64])),
        responses_per_prompt=draw(st.sampled_from([2, 8])),
        response=Lengths(mean_tokens=mean, cv=draw(st.sampled_from([0.0, 0.8])), max_tokens=int(mean * 4)),
        kv_on_update=draw(st.sampled_from(["recompute", "keep"])),
        update_mode=draw(st.sampled_from(["rolling", "pause", "overlapped"])),
        proximal_forward=draw(st.booleans()),
        reward_s_per_sample=draw(st.sampled_from([0.0, 0.5])),
    )


@st.composite
def problems(
    draw: st.DrawFn, *, most: int = 5, least: int = 2, single: bool = False, overrides: bool = False
) -> Problem:
    """Up to `most` devices of one or two kinds on up to three machines."""
    chosen = (draw(kinds("k0")), draw(kinds("k1")))
    devices = draw(
        st.lists(
            st.tuples(st.sampled_from(["k0", "k1"]), st.sampled_from(["a", "b", "c"])), min_size=least, max_size=most
        )
    )
    fleet = cluster(
        *devices, kinds=chosen, cross=draw(st.sampled_from([SLOW, LINK, Link(latency_s=0.01, bytes_per_s=1e7)]))
    )
    said: list[Override] = []
    if overrides:
        for d in fleet.devices:
            what = draw(st.sampled_from(["", "", "", "cordon", "drain", "train", "rollout", "idle"]))
            if what in ("cordon", "drain"):
                said.append(Override(device=d.id, kind=what))  # type: ignore[arg-type]
            elif what:
                said.append(Override(device=d.id, kind="pin", role=what))  # type: ignore[arg-type]
    can = Capabilities.single_device_roles()
    if not single:
        can = Capabilities(
            trainer=draw(st.sampled_from(["replicated", "fsdp"])),
            train_row_tokens=draw(st.sampled_from([None, None, 2048, 32768])),
        )
    can = replace(
        can,
        rollout_prefix_block=draw(st.sampled_from([None, None, 16])),
        direct_updates=draw(st.sampled_from([False, False, True])),
    )
    return problem(fleet, workload=draw(workloads()), capabilities=can, overrides=tuple(said))
