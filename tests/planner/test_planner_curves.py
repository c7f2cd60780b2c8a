"""Measured curves: the arithmetic by hand, what must never get worse, and that the array twin knows them too."""

import math

import numpy as np
import pytest
from fleets import LINK, SLOW, kind, problem, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.validation import serving, training
from benchmarks.validation.gate import SAMPLE
from planner.calibration import (
    Calibration,
    CollectivePoint,
    DecodePoint,
    EngineRate,
    GemmPoint,
    KindTables,
    PrefillPoint,
    Provenance,
)
from planner.calibration.curves import Sheet, collective, decode_work, gemm_work, prefill_work, roof
from planner.calibration.fitted import curves_with
from planner.calibration.grid import Grid, correction, filled
from planner.calibration.shipped import LIKENED, MEASURED, decode_curves, encode_curves, shipped
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context, context_of
from planner.cost.decode import ReplicaShape, decode_step_s, replica_level
from planner.cost.flops import kernel_share, train_attention_rate, train_rate
from planner.cost.network import Spread
from planner.cost.pipeline import pipeline_time
from planner.cost.rates import Rates
from planner.cost.training import StageShape, attention_passes, layer_s
from planner.model import ModelSpec
from planner.problem import Capabilities
from planner.record import replace
from planner.sides import Sides
from planner.space import device_classes
from planner.workload import Lengths

SEVEN = ModelSpec(
    name="7B",
    hidden=3584,
    intermediate=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152064,
    qkv_bias=True,
)
GPUS = sorted(set(LIKENED) - {"B200"})
ORIGIN = Provenance(source="test", how="simulated")


def fleet(*names: str) -> Cluster:
    devices = tuple(Device(id=f"d{i}", kind=n, node=n, index=i) for i, n in enumerate(names))
    return Cluster(kinds={n: CATALOGUE[n] for n in names}, devices=devices, same_kind=LINK, cross_kind=SLOW)


def context(*names: str, **changes: object) -> Context:
    return context_of(problem(fleet(*names), model=SEVEN, **changes))


# grids


def test_a_grid_is_exact_at_its_points_geometric_between_and_level_beyond() -> None:
    grid = Grid(axes=(np.array([0.0, 2.0]), np.array([0.0, 1.0])), values=np.array([[0.0, 1.0], [2.0, 3.0]]))
    assert grid.at(1, 1) == 1.0
    assert grid.at(4, 2) == 8.0
    assert grid.at(2, 1) == pytest.approx(2.0)  # half way between 1 and 4 in logarithms
    assert grid.at(0.1, 100) == 2.0
    assert grid.at([1, 4], 1).tolist() == [1.0, 4.0]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Tables of one to four axes, some of a single point."""
    steps = st.lists(st.floats(0.1, 4), min_size=0, max_size=4)
    axes = [np.cumsum([draw(st.floats(-3, 5)), *draw(steps)]) for _ in range(draw(st.integers(1, 4)))]
    size = math.prod(len(a) for a in axes)
    values = draw(st.lists(st.floats(-20, 20), min_size=size, max_size=size))
    return Grid(axes=tuple(axes), values=np.array(values).reshape([len(a) for a in axes]))


@given(grids(), st.data())
def test_one_shape_costs_what_arrays_of_shapes_say(grid: Grid, data: st.DataObject) -> None:
    """Whichever coordinates are arrays; at the points of the axes, beyond their ends and at nothing too."""
    rows = 3
    on_axis = [st.sampled_from(np.exp2(a).tolist()) for a in grid.axes]
    at = [data.draw(st.lists(st.one_of(points, st.floats(0, 1e5)), min_size=rows, max_size=rows)) for points in on_axis]
    # A coordinate that is the same in all rows may be given once, as an array or not.
    once = [data.draw(st.sampled_from(("rows", "number", "one row"))) for _ in grid.axes]
    at = [x if how == "rows" else [x[0]] * rows for x, how in zip(at, once, strict=True)]
    given_as = {"rows": lambda x: x, "number": lambda x: x[0], "one row": lambda x: x[:1]}
    together = grid.at(*(given_as[how](x) for x, how in zip(at, once, strict=True)))
    singly = [grid.at_one(*shape) for shape in zip(*at, strict=True)]
    assert np.broadcast_to(together, (rows,)).tolist() == pytest.approx(singly, rel=1e-12)
    arrays = grid.at(*(np.array(x) for x in at))
    assert arrays.tolist() == pytest.approx(singly, rel=1e-12)


def test_holes_take_the_neighbour_before_them() -> None:
    nan = math.nan
    assert filled(np.array([[1.0, nan, nan], [nan, 2.0, nan]])).tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.1, 10)), min_size=1, max_size=6, unique_by=lambda p: p[0]))
def test_a_correction_is_exact_where_measured_and_stays_within_what_was_seen(points: list[tuple[int, float]]) -> None:
    fix = correction([[2.0**x] for x, _ in points], [r for _, r in points], [1.0] * len(points))
    for x, ratio in points:
        assert float(fix.at(2.0**x)) == pytest.approx(ratio, rel=1e-6)
    ratios = [r for _, r in points]
    for x in np.linspace(-5, 25, 31):
        assert min(ratios) * 0.999 <= float(fix.at(2.0**x)) <= max(ratios) * 1.001


def test_collectives_are_interpolated_and_proportional_beyond_the_last_size() -> None:
    found = collective([1e6, 1e3, 1e6], [1e-3, 1e-5, 2e-3])
    assert float(found.seconds(1e6)) == pytest.approx(1e-3)
    assert float(found.seconds(1)) == pytest.approx(1e-5)
    assert float(found.seconds(4e6)) == pytest.approx(4e-3)
    assert float(found.seconds(math.sqrt(1e9))) == pytest.approx(1e-4)


# kernels by hand


def test_work_and_roof_by_hand() -> None:
    assert [float(x) for x in gemm_work(2, 3, 5, 2)] == [60, 2 * (10 + 15 + 6)]
    assert [float(x) for x in gemm_work(2, 3, 5, 1)] == [60, 10 + 15 + 12]
    assert [float(x) for x in decode_work(2, 100, 4, 7)] == [4 * 128 * 800 * 7, 4 * 128 * 800]
    assert [float(x) for x in prefill_work(2, 100, 4)] == [2 * 128 * 2 * 4 * 100**2, 4 * 128 * 800]
    sheet = Sheet(peak_flops=100.0, hbm_bytes_per_s=10.0)
    assert float(roof(400, 40, sheet)) == pytest.approx((8 + 8) ** (2 / 3))  # 4 s and 4 s
    assert float(roof(400, 0, sheet)) == pytest.approx(4)


def test_a_decode_step_is_the_sum_of_its_kernels() -> None:
    ctx = context("H100")
    curves = ctx.rates.curves(CATALOGUE["H100"])
    assert curves is not None
    layer = 0.0
    for n, k in ((3584 + 2 * 512, 3584), (3584, 3584), (2 * 18944, 3584), (3584, 18944)):
        layer += float(curves.gemm_s(64, n, k))
    attention = float(curves.decode_s(64, ctx.m.context, 4, 7))
    head = float(curves.gemm_s(64, 152064, 3584))
    credit, host = ctx.a.graph_credit_s, 64 * ctx.a.host_s_per_sample
    got = decode_step_s(ctx, ReplicaShape(kind="H100", tp=1), 64)
    assert got == pytest.approx(28 * (layer + attention - credit) + head + host, rel=1e-3)


def test_tensor_parallel_decode_pays_the_measured_all_reduce_of_its_own_host_only() -> None:
    ctx = context("H100", "H20")
    measured = shipped("H100").collectives["engine_all_reduce", 4]
    reduce = ctx.rates.reduce_s(CATALOGUE["H100"], SEVEN, 4, 64)
    assert reduce == pytest.approx(float(measured.seconds(64 * 3584 * 2)))
    assert ctx.rates.reduce_s(CATALOGUE["H20"], SEVEN, 4, 64) is None
    assert ctx.rates.reduce_s(CATALOGUE["H20"], SEVEN, 1, 64) == 0.0


def test_training_is_products_attention_and_bytes() -> None:
    ctx = context("H100")
    h100 = CATALOGUE["H100"]
    local = Spread(nodes=1, local=LINK)
    stage = StageShape(kind="H100", dp=1, tp=1, layers=1, spread=local)
    tokens = ctx.batch_tokens
    attention_rate = train_attention_rate(ctx, h100, 1)
    assert attention_rate is not None
    linear = tokens * (4 * 3584 * 128 * 32 + 6 * 3584 * 18944) / train_rate(ctx, h100, tokens, 1)
    # A forward pass, and a backward one of 2.5 times its FLOPs at 0.87 of its rate.
    attention = (1 + 2.5 / 0.87) * 2 * 64 * ctx.m.sequence2 * 28 * 128 / attention_rate
    moved = 2 * tokens * 2 * (4 * 3584 + 2 * 128 * 32 + 4 * 18944) / (0.8 * 3.35e12)
    assert layer_s(ctx, stage, share=1.0, recompute=False) == pytest.approx(3 * (linear + moved) + attention)
    half = replace(ctx, cluster=replace(ctx.cluster, kinds={"H100": replace(h100, train_efficiency=0.5)}))
    slower = layer_s(replace(half, rates=Rates()), stage, share=1.0, recompute=False)
    assert slower == pytest.approx(3 * (2 * linear + moved) + 2 * attention)


def test_attention_counts_by_its_passes() -> None:
    half = Assumptions(
        attention_backward=0.5
    )  # a backward pass: 2.5 times the FLOPs at half the rate, five forward passes
    plain = replace(context("H100"), a=half)
    proximal = replace(plain, workload=replace(plain.workload, proximal_forward=True))
    assert attention_passes(plain, False) == pytest.approx(1 + 5)
    assert attention_passes(plain, True) == pytest.approx(1 + 1 + 5)
    assert attention_passes(proximal, True) == pytest.approx(1 + 1 + 1 + 5)
    assert attention_passes(proximal, False, "critic_training") == pytest.approx(1 + 5)
    assert attention_passes(proximal, False, "reference") == 1


def test_a_trainers_attention_is_slower_where_the_table_is_of_a_newer_kernel() -> None:
    names = ("A100-40", "L40S", "RTX-PRO-6000", "H100", "H200", "H20", "B200")
    ctx = context(*names)
    cudnn = replace(ctx, train_attention="cudnn")
    got = {n: (kernel_share(ctx, CATALOGUE[n]), kernel_share(cudnn, CATALOGUE[n])) for n in names}
    assert [got[n] for n in names[:3]] == [(1.0, 1.0)] * 3
    assert [got[n] for n in names[3:6]] == [(0.57, 0.9)] * 3  # H20's curves are H100's
    assert got["B200"] == pytest.approx((math.sqrt(0.57), math.sqrt(0.9)))  # half A100's, half H100's
    slow, fast = (train_attention_rate(c, CATALOGUE["H100"], 1) for c in (ctx, cudnn))
    assert slow is not None
    assert fast is not None
    assert slow / fast == pytest.approx(0.57 / 0.9)


def test_flash_attention_2s_own_runs_are_predicted_without_a_fit() -> None:
    predicted, measured = training.flash_runs()
    # GPT-3 1.3B at 2k tokens: 6 FLOPs a parameter, attention in full, at 196 TFLOP/s.
    params = 12 * 24 * 2048**2 + 50368 * 2048
    assert measured[0] == pytest.approx(16384 * (6 * params + 12 * 24 * 2048 * 2048) / 196e12)
    assert all(abs(p / m - 1) < 0.06 for p, m in zip(predicted, measured, strict=True))


def test_a_pipeline_by_hand() -> None:
    # Stages of 2, 5 and 3 s, borders of 1 and 4 s: the middle one is busy 5 and waits 5 a micro-batch.
    found = pipeline_time([2.0, 5.0, 3.0], [1.0, 4.0], 10)
    assert (found.busy_s, found.wait_s, found.bubble_s, found.total_s) == (50, 50, 5, 105)
    assert pipeline_time([2.0], [], 3).total_s == 6
    assert pipeline_time([2.0, 5.0, 3.0], [0.0, 0.0], 1).total_s == 10


# what must never get worse


@pytest.mark.parametrize("name", GPUS)
def test_no_kernel_is_faster_than_the_sheet_allows(name: str) -> None:
    k = CATALOGUE[name]
    rates = Rates()
    for tp in (1, 4):
        rate = rates.product_rate(k, SEVEN, tp, np.exp2(np.arange(0, 20)))
        assert (np.diff(rate) >= 0).all()
        assert rate.max() <= k.peak_flops * 1.001
        assert rate.max() >= k.peak_flops * 0.3
        assert rates.product_rate_of(k, SEVEN, tp, 777.0) == pytest.approx(
            float(rates.product_rate(k, SEVEN, tp, 777.0))
        )


@given(
    name=st.sampled_from(sorted(LIKENED)),
    rows=st.floats(1, 2048),
    context=st.floats(1, 2e5),
    heads=st.floats(0.5, 8),
    per_kv=st.floats(1, 16),
    dtype=st.sampled_from(["bf16", "fp8"]),
)
def test_nothing_is_read_faster_than_from_memory(
    *, name: str, rows: float, context: float, heads: float, per_kv: float, dtype: str
) -> None:
    """All other layers pass between two reads of a layer's weights and of its key-value caches, so no cache holds them."""
    k = CATALOGUE[name]
    curves = curves_with(k, None)
    assert curves is not None
    cache = 4 * 128 * rows * context * heads
    assert float(curves.decode_s(rows, context, heads, per_kv)) >= cache / k.hbm_bytes_per_s * (1 - 1e-9)
    width = 1 if dtype == "fp8" and "fp8" in curves.sheets else 2
    weights = width * context * 1024
    assert float(curves.gemm_s(rows, context, 1024, dtype)) >= weights / k.hbm_bytes_per_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("name", "cached_s", "streamed_s"), [("L40S", 35.8e-6, 97.7e-6), ("RTX-PRO-6000", 41.3e-6, 50.9e-6)]
)
def test_cached_reads_of_the_tables_are_streamed_in_a_step(name: str, cached_s: float, streamed_s: float) -> None:
    """16 samples of 1,024 tokens, 8 key-value heads of 4 queries: 67 MB, which the tables read from the cache.

    By hand, from memory: the table's shortest time (7.4 and 6.5 us) and 67.1 MB at the reached 0.86 of 864 GB/s and 0.847 of
    1,792 GB/s. Kernels lose a little more than their shortest time.
    """
    curves = curves_with(CATALOGUE[name], None)
    assert curves is not None
    found = float(curves.decode_s(16, 1024, 8, 4))
    assert found > 1.4 * cached_s
    assert streamed_s < found < 1.25 * streamed_s


@given(st.sampled_from(GPUS), st.floats(1, 4), st.floats(1, 4), st.integers(1, 256), st.sampled_from([1, 2, 4]))
def test_a_better_sheet_never_slows_a_replica(name: str, hbm: float, peak: float, running: int, tp: int) -> None:
    ctx = context(name)
    k = CATALOGUE[name]
    better = replace(k, hbm_bytes_per_s=k.hbm_bytes_per_s * hbm, peak_flops=k.peak_flops * peak)
    other = replace(ctx, cluster=replace(ctx.cluster, kinds={name: better}), rates=Rates())
    shape = ReplicaShape(kind=name, tp=tp)
    before, after = (replica_level(c, shape, running) for c in (ctx, other))
    assert after.rate_tokens_per_s >= before.rate_tokens_per_s * (1 - 1e-6)
    assert after.recompute_s <= before.recompute_s * (1 + 1e-6)


def test_own_names_paced_devices_and_cpus_keep_the_formula() -> None:
    rates = Rates()
    assert rates.curves(kind("compute")) is None
    assert rates.curves(CATALOGUE["host-cpu"]) is None
    assert Rates().curves(replace(CATALOGUE["H100"], paced=True)) is None
    assert all(Rates().curves(CATALOGUE[n]) is not None for n in LIKENED)
    assert set(LIKENED) <= set(CATALOGUE)


# the user's own measurements


def _tables(name: str, **points: tuple[object, ...]) -> Calibration:
    return Calibration(kinds=(KindTables(kind=name, provenance=ORIGIN, **points),))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["H100", "H20", "my-card"])
def test_measured_points_are_met_exactly(name: str) -> None:
    card = replace(CATALOGUE["H100"], name=name, hbm_bytes_per_s=2.5e12)
    gemm = tuple(GemmPoint(m=m, n=4096, k=4096, dtype="bf16", seconds=1e-5 * (1 + m / 100)) for m in (1, 256, 4096))
    decode = (DecodePoint(batch=64, context=2048, heads=28, kv_heads=4, head_dim=128, seconds=3e-4),)
    prefill = (PrefillPoint(batch=1, tokens=4096, heads=28, kv_heads=4, head_dim=128, seconds=5e-3),)
    reduce = tuple(CollectivePoint(op="all_reduce", ranks=2, size_bytes=s, seconds=s / 1e9) for s in (1e4, 1e8))
    curves = curves_with(card, _tables(name, gemm=gemm, decode=decode, prefill=prefill, collectives=reduce))
    assert curves is not None
    for p in gemm:
        assert float(curves.gemm_s(p.m, p.n, p.k)) == pytest.approx(p.seconds, rel=1e-5)
    assert float(curves.decode_s(64, 2048, 4, 7)) == pytest.approx(3e-4, rel=1e-5)
    assert float(curves.prefill_s(1, 4096, 28)) == pytest.approx(5e-3, rel=1e-5)
    found = curves.collective_s("engine_all_reduce", 2, 1e6)
    assert found is not None
    assert float(found) == pytest.approx(1e-3)
    kept = curves.collective_s("all_reduce", 8, 1e6)
    assert (kept is not None) == (name == "H100"), "a host's collectives stay with it"


def test_the_cost_model_prefers_the_users_points() -> None:
    slow = tuple(
        GemmPoint(m=m, n=n, k=3584, dtype="bf16", seconds=10 * float(shipped_s(m, n)))
        for m in (1, 64)
        for n in (3584, 37888)
    )
    p = problem(fleet("H100"), model=SEVEN)
    shape = ReplicaShape(kind="H100", tp=1)
    before = CostModel(p).level(shape, 16).rate_tokens_per_s
    given_ = CostModel(p, calibration=_tables("H100", gemm=slow)).level(shape, 16).rate_tokens_per_s
    carried = CostModel(replace(p, calibration=_tables("H100", gemm=slow))).level(shape, 16).rate_tokens_per_s
    assert given_ == carried
    assert given_ < before / 4
    other = CostModel(replace(p, calibration=_tables("H200", gemm=slow))).level(shape, 16).rate_tokens_per_s
    assert other == before


def test_a_measured_engine_rate_comes_out_at_its_shape_and_model_only() -> None:
    p = problem(fleet("H100"), model=SEVEN)
    context_tokens = round(context_of(p).m.context)
    point = EngineRate(
        phase="decode", model="7B", params=SEVEN.params, tp=1, running=32, context=context_tokens, tokens_per_s=1234.0
    )
    plain = context_of(p)
    ctx = context_of(p, None, _tables("H100", engine=(point,)))
    assert decode_step_s(ctx, ReplicaShape(kind="H100", tp=1), 32) == pytest.approx(32 / 1234, rel=1e-3)
    for other in (ReplicaShape(kind="H100", tp=2), ReplicaShape(kind="H100", tp=1, pp=2)):
        assert decode_step_s(ctx, other, 32) == decode_step_s(plain, other, 32)
    smaller = replace(ctx, model=replace(SEVEN, layers=14))
    shape = ReplicaShape(kind="H100", tp=1)
    assert decode_step_s(smaller, shape, 32) == decode_step_s(replace(plain, model=smaller.model), shape, 32)


def shipped_s(m: int, n: int) -> float:
    curves = curves_with(CATALOGUE["H100"], None)
    assert curves is not None
    return float(curves.gemm_s(m, n, 3584))


@pytest.mark.parametrize("name", MEASURED)
def test_shipped_files_come_back_as_they_were_written(name: str) -> None:
    written = encode_curves(shipped(name))
    assert encode_curves(decode_curves(written)) == written


# the array twin


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from(["H100", "H20", "L40S", "A100-40", "L4"]), min_size=2, max_size=10),
    st.sampled_from(["replicated", "fsdp"]),
    st.booleans(),
)
def test_many_shapes_at_once_cost_what_each_costs_alone(names: list[str], trainer: str, reference: bool) -> None:
    p = problem(
        fleet(*names),
        model=replace(SEVEN, hidden=1536, intermediate=8960, heads=12, kv_heads=2),
        workload=workload(
            reference_model=reference,
            response=Lengths(mean_tokens=1500, cv=0.8, max_tokens=6000),
            proximal_forward=True,
        ),
        capabilities=Capabilities(trainer=trainer),  # type: ignore[arg-type]
    )
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    count = int(sides.starts[-1])
    for group, (score, train) in sides.seconds.items():
        for at in range(0, count, max(1, count // 40)):
            blocks = sides.candidate(at)
            alone = sides.relaxed.group(blocks, group)
            if alone is None:
                assert math.isinf(score[at] + train[at])
            else:
                assert score[at] == pytest.approx(alone.score_s, rel=1e-9)
                assert train[at] == pytest.approx(alone.train_s - alone.score_s, rel=1e-9)


def test_the_assumptions_are_what_the_validation_fits() -> None:
    a = Assumptions()
    share, credit_ms = serving.fit([r for r in serving.runs(SAMPLE) if r.kind == "H100"])
    assert a.prefill_share == pytest.approx(share, rel=0.05)
    assert a.graph_credit_s == pytest.approx(1e-3 * credit_ms, rel=0.05)
    _, constants = training.run(SAMPLE)
    for card in ("A100-40", "A100-80", "H100"):
        assert a.train_products == pytest.approx(1 / constants[f"{card}: coefficient of products"], rel=0.03)
    fitted = constants[f"{training.FITTED_ON}: coefficient of attention"]
    assert pytest.approx(1 / fitted, rel=0.02) == training.LLM_FOUNDRY_ATTENTION
    for card in ("A100-40", "H100"):  # which saw nothing of their own: a trainer's kernel is as slow on all kinds
        assert constants[f"{card}: coefficient of attention"] == pytest.approx(fitted, rel=0.07)


def test_a_shape_of_nothing_is_the_least_shape_without_a_word() -> None:
    """A replica whose last sample ends decodes a batch of 0 at a context of 0: no warning, and the value at the end."""
    grid = Grid(axes=(np.array([0.0, 2.0]),), values=np.array([1.0, 3.0]))
    with np.errstate(divide="raise"):
        assert grid.at(0.0) == grid.at(1.0) == 2.0
