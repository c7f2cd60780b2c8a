"""Trainers whose DP ranks are of two kinds: shares and costs by hand, the judge, and what the plans gain."""

import math

import pytest
from fleets import BANDWIDTH, COMPUTE, LINK, SLOW, TINY, cluster, kind, problem, workload
from hypothesis import given
from hypothesis import strategies as st

from planner import Feasible, solve, violations
from planner.cluster import Cluster, DeviceKind, Link
from planner.cost import Assumptions, CostModel
from planner.cost.context import context_of
from planner.cost.network import Place, Spread, ring_s, spread_collective_s, spread_of
from planner.cost.ranks import (
    MixedShape,
    RankShape,
    mixed_collective_s,
    mixed_cost,
    mixed_shape,
    rank_imbalance,
    rounds_of,
    shares_by_compute,
)
from planner.cost.training import StageShape, TrainerShape
from planner.errors import InvalidInput
from planner.export import EXPORTERS, export
from planner.plan import Placement, Plan, Stage
from planner.problem import Capabilities
from planner.record import replace
from planner.repair import repair
from planner.solution import Repaired
from planner.whatif import without_devices
from planner.workload import Lengths

A = Assumptions()
IDEAL = Assumptions(
    gemm_ceiling=1.0, gemm_half_tokens=0.0, gemm_half_width=0.0, hbm_efficiency=1.0, link_efficiency=1.0
)
EVEN = workload(
    prompt=Lengths(mean_tokens=100, max_tokens=100), response=Lengths(mean_tokens=400, max_tokens=400), eta=1
)
MIXED_DP = Capabilities(train_mixed_dp=True)

# shares


def test_shares_follow_compute_and_the_kinds_training_efficiency() -> None:
    """300 and 100 TFLOP/s, two ranks of each: 3 + 3 + 1 + 1 eighths. At an efficiency of 1/3 all are alike."""
    fast, slow = kind("fast", tflops=300), kind("slow", tflops=100)
    at = cluster(("fast", "a"), ("slow", "b"), kinds=(fast, slow))
    ranks = [("fast", 2), ("slow", 2)]
    assert shares_by_compute(context_of(problem(at)), ranks, 1) == pytest.approx((3 / 8, 1 / 8))
    calibrated = replace(at, kinds={"fast": replace(fast, train_efficiency=1 / 3), "slow": slow})
    assert shares_by_compute(context_of(problem(calibrated)), ranks, 1) == pytest.approx((1 / 4, 1 / 4))


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2]), st.sampled_from([60.0, 148.0, 989.0]))
def test_shares_of_all_ranks_sum_to_one(a: int, b: int, tp: int, tflops: float) -> None:
    at = cluster(("x", "a"), ("y", "b"), kinds=(kind("x", tflops=tflops), kind("y", tflops=300)))
    x, y = shares_by_compute(context_of(problem(at)), [("x", a), ("y", b)], tp)
    assert math.isclose(a * x + b * y, 1)
    assert math.isclose(x / y, tflops / 300)


def test_imbalance_of_whole_sequences() -> None:
    """Two equal sequences on ranks of 60 and 40 %: one each, 1.25 times what the smaller rank should have. Two on 75 and
    25 %: both to the larger, 4/3 of its share. Four on those: three and one, as they should."""
    two, four = (replace(EVEN, prompts_per_step=n, responses_per_prompt=2) for n in (1, 2))

    def imbalance(shares: tuple[float, ...], samples: object) -> float:
        ranks = [RankShape(kind="compute", dp=1, share=x) for x in shares]
        return rank_imbalance(context_of(problem(workload=samples)), ranks)

    assert imbalance((0.6, 0.4), two) == pytest.approx(1.25)
    assert imbalance((0.75, 0.25), two) == pytest.approx(4 / 3)
    assert imbalance((0.75, 0.25), four) == pytest.approx(1.0)
    assert imbalance((1.0,), four) == 1.0


def test_micro_batches_are_counted_on_the_fullest_rank() -> None:
    assert rounds_of(64, 3 / 8, 1) == 24
    assert rounds_of(64, 3 / 8, 16) == 2  # 24 sequences, 16 at a time
    assert rounds_of(64, 1 / 3, 1) == 22
    assert rounds_of(64, 1 / 64, 4) == 1


# cost


def test_a_step_by_hand() -> None:
    """Paced kinds of 3 and 1 GFLOP/s on a model of 2 layers, no efficiency curves: each rank takes the tokens of its share,
    and all are done at once. Gradients cross the slow link between the two machines."""
    fast = kind("fast", tflops=0.003, hbm=1e30, paced=True, launch_s=0.0)
    slow = kind("slow", tflops=0.001, hbm=1e30, paced=True, launch_s=0.0)
    at = cluster(("fast", "a"), ("slow", "b"), kinds=(fast, slow))
    p = problem(at, model=TINY, workload=EVEN)
    cost = CostModel(p, IDEAL)
    places = [[Place(node="a", kind="fast", region="local")], [Place(node="b", kind="slow", region="local")]]
    ranks = [RankShape(kind="fast", dp=1, share=0.75), RankShape(kind="slow", dp=1, share=0.25)]
    found = cost.trainer(mixed_shape(at, ranks, places, tp=1, layers=2))
    assert found is not None
    tokens, tokens2 = 64 * 500, 64 * 500**2
    layer = tokens * (4 * 64 * 16 * (4 + 2) + 6 * 64 * 192) + 2 * tokens2 * 4 * 16
    flops = 3 * (2 * layer + 2 * tokens * 64 * 32)
    assert found.compute_s == pytest.approx(flops / 4e9, rel=1e-9)  # 48 and 16 of 64 sequences: no imbalance
    params = 2 * TINY.layer_params + 32 * 64 + 64
    assert found.communication_s == pytest.approx(2 * SLOW.latency_s + params * 4 / SLOW.bytes_per_s)
    assert found.train_s == pytest.approx(found.compute_s + found.communication_s, rel=1e-9)
    assert not found.recompute
    equal = [replace(r, share=0.5) for r in ranks]
    other = cost.trainer(mixed_shape(at, equal, places, tp=1, layers=2))
    assert other is not None
    assert other.compute_s == pytest.approx(flops / 2 / 1e9, rel=1e-9)  # the slow rank has half of the tokens


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
    st.sampled_from(["fsdp", "replicated"]),
    st.booleans(),
)
def test_ranks_that_are_alike_cost_what_a_stage_of_one_kind_costs(
    a: int, b: int, tp: int, trainer: str, proximal: bool
) -> None:
    """A kind under two names."""
    at = cluster(("x", "a"), ("y", "b"), kinds=(kind("x"), kind("y")), cross=LINK)
    p = problem(
        at,
        workload=workload(proximal_forward=proximal, reference_model=True),
        capabilities=Capabilities(trainer=trainer),  # type: ignore[arg-type]
    )
    cost, dp = CostModel(p), a + b
    machines = [Place(node=f"n{i}", kind="x", region="local") for i in range(dp)]
    others = [Place(node=f"m{i}", kind="y", region="local") for i in range(b)]
    ranks = [RankShape(kind="x", dp=a, share=1 / dp), RankShape(kind="y", dp=b, share=1 / dp)]
    mixed = cost.trainer(mixed_shape(at, ranks, [machines[:a], others], tp=tp, layers=24))
    stage = StageShape(kind="x", dp=dp, tp=tp, layers=24, spread=spread_of(at, tuple(machines)))
    plain = cost.trainer(TrainerShape(stages=(stage,)))
    assert (mixed is None) == (plain is None)
    if mixed is not None and plain is not None:
        for figure in ("train_s", "score_s", "compute_s", "communication_s", "micro_batches", "recompute"):
            assert getattr(mixed, figure) == pytest.approx(getattr(plain, figure), rel=1e-9)
        assert mixed.resident_bytes == pytest.approx(plain.resident_bytes)


def test_a_collective_crosses_the_links_between_the_kinds() -> None:
    """Eight ranks of a kind in one machine, two of the other in the next: rings inside both at once, the slower of which
    counts, then one ring of two machines over the link between kinds."""
    x, y = kind("x", link=3e11), kind("y", link=3.2e10)
    at = cluster(("x", "a"), ("y", "b"), kinds=(x, y))
    places = [[Place(node="a", kind="x", region="local")] * 8, [Place(node="b", kind="y", region="local")] * 2]
    ranks = [RankShape(kind="x", dp=8, share=0.11), RankShape(kind="y", dp=2, share=0.06)]
    shape = mixed_shape(at, ranks, places, tp=1, layers=24)
    assert (shape.nodes, shape.remote) == (2, SLOW)
    inside = [ring_s(Link(latency_s=1e-5, bytes_per_s=r), 1e9, n, 2, A) for r, n in ((3e11, 8), (3.2e10, 2))]
    assert mixed_collective_s(shape, 1e9, 2, A) == pytest.approx(max(inside) + ring_s(SLOW, 1e9, 2, 2, A))
    together = [[Place(node="a", kind=k, region="local") for _ in range(n)] for k, n in (("x", 8), ("y", 2))]
    one = mixed_shape(at, ranks, together, tp=1, layers=24)
    slowest = Spread(nodes=1, local=Link(latency_s=1e-5, bytes_per_s=3.2e10))
    assert (one.nodes, one.remote) == (1, None)
    assert mixed_collective_s(one, 1e9, 2, A) == pytest.approx(
        spread_collective_s(slowest, 1e9, dp=10, tp=1, passes=2, a=A)
    )


def test_links_of_many_machines_are_told_from_few_of_them() -> None:
    """Two machines of a kind and region stand for all; the slowest link of any pair is the same."""
    at = replace(
        cluster(("x", "a"), ("y", "b"), kinds=(kind("x"), kind("y"))),
        regions={("r", "s"): Link(latency_s=0.01, bytes_per_s=1e8)},
    )
    places = [[Place(node=f"{r}{i}", kind=k, region=r) for r in "rs" for i in range(3)] for k in "xy"]
    ranks = [RankShape(kind=k, dp=6, share=1 / 12) for k in "xy"]
    assert mixed_shape(at, ranks, places, tp=1, layers=24).remote == Link(latency_s=0.01, bytes_per_s=1e8)
    near = [[p for p in some if p.region == "r"] for some in places]
    assert mixed_shape(at, ranks, near, tp=1, layers=24).remote == SLOW  # of one machine each holds both kinds


def test_memory_is_asked_of_each_kind_at_its_own_tokens() -> None:
    """On a card with room for a small micro-batch only, a small share fits at fewer micro-batches than half of the tokens."""
    big, small = kind("big", tflops=900), kind("small", tflops=100, memory=14e9)
    at = cluster(("big", "a"), ("small", "b"), kinds=(big, small))
    p = problem(at, workload=replace(EVEN, prompts_per_step=64))
    ctx, cost = context_of(p), CostModel(p)

    def shape(share: float) -> MixedShape:
        ranks = (RankShape(kind="big", dp=1, share=1 - share), RankShape(kind="small", dp=1, share=share))
        return MixedShape(ranks=ranks, tp=1, layers=24, rings=(), nodes=2, remote=SLOW)

    tenth, half = cost.trainer(shape(0.1)), cost.trainer(shape(0.5))
    assert tenth is not None
    assert half is not None
    assert tenth.micro_batches < half.micro_batches
    none = replace(at, kinds={"big": big, "small": replace(small, memory_bytes=6e9)})
    assert mixed_cost(replace(ctx, cluster=none), shape(0.1), 1.0) is None


# plans


def _stage(at: Cluster, fast: int, slow: int, *, shares: tuple[float, ...] = (), label: str = "") -> Stage:
    """The first `fast` and then `slow` devices of the two kinds of a fleet, side by side."""
    a, b = [*dict.fromkeys(d.kind for d in at.devices)][:2]
    devices = [d.id for d in at.devices if d.kind == a][:fast] + [d.id for d in at.devices if d.kind == b][:slow]
    return Stage(
        devices=tuple(devices), kind=label or f"{a}+{b}", dp=len(devices), tp=1, layers=24, token_shares=shares
    )


def _plan(stage: Stage, rollout: str) -> Plan:
    train = Placement(role="train", kind=stage.kind, devices=stage.devices, dp=stage.dp, tp=stage.tp, stages=(stage,))
    return Plan(placements=(train, Placement(role="rollout", kind="bandwidth", devices=(rollout,))))


FLEET = cluster(("compute", "a"), ("compute", "a"), ("bandwidth", "b"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))
SHARED = _stage(FLEET, 2, 1, shares=(0.4, 0.4, 0.2))


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (SHARED, ""),
        (replace(SHARED, token_shares=()), ""),
        (replace(SHARED, token_shares=(0.5, 0.5)), "2 token shares for 3 DP ranks"),
        (replace(SHARED, token_shares=(0.6, 0.4, 0.0)), "no share"),
        (replace(SHARED, token_shares=(0.4, 0.4, 0.4)), "sum to 1.2"),
        (replace(SHARED, kind="compute"), "not all of kind compute"),
        (replace(SHARED, kind="bandwidth+compute"), "not all of kind"),
        (replace(SHARED, tp=3, dp=1, token_shares=()), "mixes device kinds"),
    ],
)
def test_the_judge_on_token_shares(stage: Stage, words: str) -> None:
    found = violations(_plan(stage, "d3"), problem(FLEET, capabilities=MIXED_DP))
    assert (found == ()) if not words else any(words in v for v in found)


def test_the_judge_without_the_capability() -> None:
    found = violations(_plan(SHARED, "d3"), problem(FLEET))
    assert any("equal shares" in v for v in found)
    assert any("not all of kind" in v for v in found)
    alike = _stage(FLEET, 2, 0, shares=(0.7, 0.3), label="compute")
    assert any("equal shares" in v for v in violations(_plan(alike, "d3"), problem(FLEET)))
    assert violations(_plan(alike, "d3"), problem(FLEET, capabilities=MIXED_DP)) == ()


def test_the_judge_wants_memory_of_each_kind_and_one_stage() -> None:
    small = replace(FLEET, kinds={"compute": COMPUTE, "bandwidth": replace(BANDWIDTH, memory_bytes=7e9)})
    found = violations(_plan(SHARED, "d3"), problem(small, capabilities=MIXED_DP))
    assert any(v.startswith("trainer stage 0: needs") and v.endswith("on each bandwidth of 7.0 GB") for v in found)
    assert not any("on each compute" in v for v in found)
    halves = (replace(SHARED, layers=12), _stage(FLEET, 0, 2, label="bandwidth"))
    train = Placement(
        role="train", kind="compute+bandwidth", devices=("d0", "d1", "d2"), dp=3, pp=2,
        stages=(halves[0], replace(halves[1], devices=("d3",), dp=1, layers=12)),
    )  # fmt: skip
    both = Plan(placements=(replace(train, devices=("d0", "d1", "d2", "d3")),))
    assert any("need a trainer of one stage" in v for v in violations(both, problem(FLEET, capabilities=MIXED_DP)))


def _slowed(at: float, hbm: float = 2e12) -> tuple[DeviceKind, DeviceKind, DeviceKind]:
    card = kind("card", tflops=300, hbm=hbm)
    return card, replace(card, name=f"card@{at}", train_efficiency=at), kind("roll", tflops=30, hbm=4e12, memory=6e9)


def test_ranks_on_a_slowed_copy_of_a_kind_beat_leaving_it_out_and_equal_shares() -> None:
    """Two cards, one of which is slowed to 0.6. Left out: 1 of the tokens a unit of time. Equal shares: the slow one holds
    the other up, 2 x 0.6. By speed: 1.6."""
    kinds = _slowed(0.6, hbm=2e13)  # elementwise kernels, which are not slowed, take next to nothing
    at = cluster(("card", "a"), ("card@0.6", "b"), *[("roll", "c")] * 4, kinds=kinds, cross=LINK)
    p = problem(at, workload=replace(EVEN, prompts_per_step=2000), capabilities=replace(MIXED_DP, train_max_pp=1))
    cost = CostModel(p)
    shares = shares_by_compute(cost.context, [("card", 1), ("card@0.6", 1)], 1)
    assert shares == pytest.approx((0.625, 0.375))

    def train_s(stage: Stage) -> float:
        train = Placement(role="train", kind=stage.kind, devices=stage.devices, dp=stage.dp, stages=(stage,))
        found = cost.trainer(cost.trainer_shape(train))
        assert found is not None
        return found.train_s

    by_speed = train_s(_stage(at, 1, 1, shares=shares))
    alone, equal = train_s(_stage(at, 1, 0, label="card")), train_s(_stage(at, 1, 1))
    assert by_speed < equal < alone
    assert alone / by_speed == pytest.approx(1.6, rel=0.05)  # but for gradients
    assert equal / by_speed == pytest.approx(1.6 / 1.2, rel=0.05)


def test_hex_trains_on_both_kinds_where_that_is_faster() -> None:
    """Without a pipeline the trainer has one of the kinds only, unless its ranks may be of two."""
    at = cluster(("card", "a"), ("card@0.6", "b"), *[("roll", "c")] * 16, kinds=_slowed(0.6), cross=LINK)
    few = Capabilities(train_max_tp=1, train_max_pp=1, train_max_kinds=1)
    p = problem(at, workload=replace(EVEN, prompts_per_step=400, eta=4), capabilities=few)
    before, after = solve(p), solve(replace(p, capabilities=replace(few, train_mixed_dp=True)))
    assert isinstance(before, Feasible)
    assert isinstance(after, Feasible)
    train = after.plan.train
    assert train is not None
    assert train.kind == train.stages[0].kind == "card+card@0.6"
    assert sorted(train.stages[0].token_shares) == pytest.approx([0.375, 0.625])
    assert after.prediction.tokens_per_s > 1.3 * before.prediction.tokens_per_s
    lines = " ".join(after.explanation.lines)
    assert "1 rank on card takes 62.5%" in lines
    assert "1 rank on card@0.6 takes 37.5%" in lines


@pytest.mark.parametrize("target", EXPORTERS)
def test_no_target_can_be_told_of_unlike_ranks(target: str) -> None:
    p = problem(FLEET, capabilities=MIXED_DP)
    for stage in (SHARED, replace(SHARED, token_shares=()), _stage(FLEET, 2, 0, shares=(0.7, 0.3), label="compute")):
        with pytest.raises(InvalidInput, match="unequal shares of the tokens or are of two kinds"):
            export(target, _plan(stage, "d3"), p)


@pytest.mark.parametrize(("lost", "kinds"), [("d1", {"compute", "bandwidth"}), ("d2", {"compute"})])
def test_repair_keeps_the_ranks_that_are_whole(lost: str, kinds: set[str]) -> None:
    previous = _plan(SHARED, "d3")
    after = without_devices(problem(FLEET, capabilities=MIXED_DP), {lost})
    found = repair(after, previous)
    assert isinstance(found, Repaired)
    assert violations(found.plan, after) == ()
    train = found.plan.train
    assert train is not None
    assert set(train.devices) == {"d0", "d1", "d2"} - {lost}
    assert set(train.kind.split("+")) == kinds
    assert len(train.stages[0].token_shares) == (2 if len(kinds) == 2 else 0)
