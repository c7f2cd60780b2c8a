"""Plans over several regions against brute force: distance, streams and the bound."""

from fleets import kind, problem, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Budget, Feasible, Problem, solve, violations
from planner.cluster import Cluster, Device, Link
from planner.problem import Capabilities

SLACK = 1 + 1e-6
KINDS = {
    "compute": kind("compute", tflops=800, hbm=1e12, memory=12e9),
    "bandwidth": kind("bandwidth", tflops=100, hbm=4e12),
}
links = st.builds(
    Link,
    latency_s=st.sampled_from([1e-5, 5e-3, 0.08, 2.0]),
    bytes_per_s=st.sampled_from([1e7, 5e8, 5.1e8]),
    streams=st.sampled_from([1, 8]),
)


@st.composite
def far_flung(draw: st.DrawFn) -> Problem:
    """Up to four devices of two kinds, one a machine, over three regions whose links differ in every way."""
    where = draw(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from("xyz")), min_size=2, max_size=4))
    cluster = Cluster(
        kinds=KINDS,
        devices=tuple(Device(id=f"d{i}", kind=k, node=f"n{i}", region=r) for i, (k, r) in enumerate(where)),
        same_kind=draw(links),
        cross_kind=draw(links),
        cross_region=draw(links),
        regions={("x", "y"): draw(links), ("x", "z"): draw(links)},
    )
    trainer = draw(st.sampled_from(["replicated", "fsdp"]))
    return problem(cluster, workload=draw(workloads()), capabilities=Capabilities(trainer=trainer))  # type: ignore[arg-type]


@settings(max_examples=15)
@given(far_flung())
def test_no_plan_beats_the_bound_wherever_the_machines_are(p: Problem) -> None:
    best = solve(p, scheduler="exhaustive", budget=Budget(evaluations=10**9))
    for scheduler in ("areal-hex", "hex"):
        found = solve(p, scheduler=scheduler)
        assert isinstance(best, Feasible) == isinstance(found, Feasible)
        if isinstance(best, Feasible) and isinstance(found, Feasible):
            assert violations(found.plan, p) == ()
            assert found.prediction.tokens_per_s <= best.prediction.tokens_per_s * SLACK
            assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK
