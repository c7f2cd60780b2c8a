"""What holds a plan back and what one change gives: against hand-made bottlenecks and plans solved anew."""

import pytest
from fleets import BANDWIDTH, COMPUTE, FLEET_OF_FIVE, SLOW, cluster, kind, problem, problems, workload
from hypothesis import assume, given, settings

from planner import Capabilities, Feasible, Problem, Solution, solve
from planner.calibration import Calibration, EngineRate, KindTables, Provenance
from planner.cluster import Device
from planner.override import Override
from planner.record import replace
from planner.sensitivity import actions, changes_of, held_back_by
from planner.workload import Lengths

SINGLE = Capabilities.single_device_roles()
PAIR = cluster(("compute", "a"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))


def by_hex(p: Problem) -> Solution:
    return solve(p, scheduler="hex")


def planned(p: Problem) -> Feasible:
    found = by_hex(p)
    assert isinstance(found, Feasible)
    return found


def strongest(p: Problem) -> str:
    return held_back_by(p, planned(p).plan)[0].what


def pinned(**changes: object) -> Problem:
    """d0 trains and d1 generates."""
    said = {"capabilities": SINGLE, **changes}
    return problem(PAIR, overrides=(Override(device="d0", kind="pin", role="train"),), **said)


def slow(p: Problem, name: str, **changes: float) -> Problem:
    kinds = {**p.cluster.kinds, name: replace(p.cluster.kinds[name], **changes)}
    return replace(p, cluster=replace(p.cluster, kinds=kinds))


def test_shared_prompts_and_checkpoints_are_told_where_they_matter() -> None:
    asked = workload(prompt=Lengths(mean_tokens=1301, max_tokens=1301), checkpoint_every=4)
    can = replace(SINGLE, rollout_prefix_block=16)
    p = pinned(workload=asked, capabilities=can)

    def told(q: Problem) -> str:
        return "\n".join(planned(q).explanation.lines)

    # 1,296 of 1,301 tokens once in four samples: 5 + 1,296 / 4 are prefilled a sample.
    assert "4 samples of a prompt share 1296 of its 1301 tokens on a replica: 329 are prefilled a sample" in told(p)
    assert "share" not in told(replace(p, capabilities=SINGLE))
    short = replace(p, workload=replace(asked, prompt=Lengths(mean_tokens=20, max_tokens=20)))
    assert "of its 20 tokens" not in told(short)
    assert "checkpoints" not in told(p)
    saving = slow(p, "compute", train_fixed_s=5.0, checkpoint_s=5.0)
    assert "checkpoints are 5 s of a step's training (one in 4 steps: 20 s each)" in told(saving)


def test_a_pace_that_was_not_steady_is_told_beside_what_it_costs() -> None:
    p = pinned()

    def measured(slowest: float | None) -> Problem:
        rate = EngineRate(
            phase="decode", model="m", params=1, tp=1, running=1, context=1, tokens_per_s=1.0, slowest=slowest
        )
        tables = KindTables(
            kind="bandwidth", provenance=Provenance(source="a test", how="measured", host="h"), engine=(rate,)
        )
        return replace(p, calibration=Calibration(kinds=(tables,)))

    found = planned(measured(0.75))
    (line,) = [x for x in found.explanation.lines if "slower on" in x]
    rollout_s = found.prediction.rollout_s
    assert line.startswith("the engine was 25% slower on bandwidth for seconds when measured")
    assert line.endswith(f"rollout takes up to {rollout_s / 0.75:.3g} s a step")
    for steady in (0.95, None):
        assert "slower on" not in "\n".join(planned(measured(steady)).explanation.lines)


def test_each_bottleneck_is_found() -> None:
    long = workload(response=Lengths(mean_tokens=1500, cv=0.6, max_tokens=6000), prompts_per_step=256)
    assert strongest(slow(pinned(), "compute", peak_flops=1e12)) == "compute of compute (training)"
    assert (
        strongest(slow(pinned(workload=long), "bandwidth", hbm_bytes_per_s=1e10))
        == "HBM bandwidth of bandwidth (rollout)"
    )
    tight = slow(pinned(workload=long), "bandwidth", memory_bytes=4e9, launch_s=2e-3)
    assert strongest(tight) == "KV memory of bandwidth (rollout)"
    assert strongest(pinned(workload=workload(mode="sync", reward_s_per_sample=1e4))) == "rewards on CPUs"
    gone = replace(SLOW, bytes_per_s=1e7)
    updated = pinned(workload=workload(kv_on_update="keep"))
    updated = replace(updated, cluster=replace(updated.cluster, cross_kind=gone))
    assert strongest(updated) == "weight update (overlapped)"
    assert "links between kinds" in [p.what for p in held_back_by(updated, planned(updated).plan)]
    few = workload(
        prompts_per_step=1, responses_per_prompt=2, eta=1, response=Lengths(mean_tokens=4000, cv=0.8, max_tokens=16000)
    )
    assert "staleness bound (one more step)" in [
        p.what for p in held_back_by(pinned(workload=few), planned(pinned(workload=few)).plan)
    ]


def test_a_tenth_more_of_what_alone_paces_the_step_gives_a_tenth() -> None:
    """Training is paced by FLOP/s alone where memory, launches and links cost nothing."""
    k = kind("compute", tflops=1, hbm=1e18, memory=1e15, link=1e18, launch_s=0.0)
    p = replace(pinned(), cluster=replace(PAIR, kinds={"compute": k, "bandwidth": BANDWIDTH}))
    [first, *_] = held_back_by(p, planned(p).plan)
    assert first.what == "compute of compute (training)"
    assert first.gain == pytest.approx(0.1, rel=0.01)


@settings(max_examples=6)
@given(problems(most=3, least=2))
def test_actions_are_plans_solved_anew_and_none_exceeds_its_bound(p: Problem) -> None:
    found = by_hex(p)
    assume(isinstance(found, Feasible))
    assert isinstance(found, Feasible)
    told = actions(p, found, by_hex)
    assert len({a.what for a in told}) == len(told)
    gains = [a.gain for a in told if a.gain is not None]
    assert gains == sorted(gains, reverse=True)
    for a in told:
        assert (a.gain is None) == (a.at_most is None)
        if a.gain is not None and a.at_most is not None:
            assert a.gain <= a.at_most + 1e-6
        if a.what.startswith("one more"):
            assert a.gain is not None
            assert a.gain >= -1e-9, "one more device never makes the optimum worse"
        if a.what.endswith("fewer") and a.gain is not None and a.gain > 0:
            assert found.gap > 0, "less never gives more than the optimum"


def test_the_changes_asked_about() -> None:
    p = problem(FLEET_OF_FIVE, overrides=(Override(device="d0", kind="cordon"), Override(device="d1", kind="cordon")))
    names = [what for what, _ in changes_of(p, planned(p).plan)]
    assert "one compute fewer" not in names  # both are under an override
    assert {
        "one more compute",
        "one bandwidth fewer",
        "eta 8 instead of 4",
        "KV caches kept on a weight update",
    } <= set(names)
    assert not any("regions" in n for n in names)
    far = replace(
        p,
        cluster=replace(
            p.cluster, devices=(*p.cluster.devices, Device(id="x", kind="compute", node="z", region="far"))
        ),
    )
    assert any("regions" in n for n, _ in changes_of(far, planned(far).plan))
    sync = replace(p, workload=workload(mode="sync"))
    assert not any(n.startswith(("eta", "KV")) for n, _ in changes_of(sync, planned(sync).plan))


def test_a_stop_ends_the_asking() -> None:
    p = problem(FLEET_OF_FIVE)
    found, asked = planned(p), iter(range(100))
    assert len(actions(p, found, by_hex, should_stop=lambda: next(asked) >= 2)) == 2


def test_the_runner_up_says_what_costs_it_the_time() -> None:
    found = solve(problem(FLEET_OF_FIVE), scheduler="areal-hex")
    assert isinstance(found, Feasible)
    [line] = [x for x in found.explanation.lines if x.startswith("next best")]
    assert "slower: its training takes" in line or "slower: its rollout takes" in line


def test_long_samples_go_to_the_replicas_with_the_shorter_token_time() -> None:
    """One card trains; of the others the one with four times the memory bandwidth takes the long samples."""
    fleet = cluster(("compute", "a"), ("compute", "a"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))
    pins = tuple(
        Override(device=d, kind="pin", role=r) for d, r in (("d0", "train"), ("d1", "rollout"), ("d2", "rollout"))
    )
    found = solve(problem(fleet, overrides=pins))
    assert isinstance(found, Feasible)
    assert {r.kind: r.strong for r in found.plan.rollouts} == {"compute": False, "bandwidth": True}
    assert "long samples go first to the replicas on 1 x bandwidth" in found.explanation.lines
