"""Weights that go by way of replicas in another region: the simulated run beside the predicted one."""

import pytest

from planner.cluster import Cluster, Device, Link
from planner.cost.model import CostModel
from planner.override import Override
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from planner.workload import UpdateMode
from runtime.sim import Options, simulate
from runtime.sim.physics import Physics
from runtime.sim.timeline import Timeline
from tests.sim.test_sim_run import problem

POOR, GOOD = Link(latency_s=0.005, bytes_per_s=2e8), Link(latency_s=0.01, bytes_per_s=1e9)
REGIONS = {"a": "x", "b": "x", "c": "y", "d": "z"}


def far_flung(update: UpdateMode, *, xz: Link = POOR, without: str = "") -> Problem:
    """Compute in x trains; memory in y and z generates. x and z are joined poorly, both are joined well to y."""
    p = problem(update_mode=update, eta=4, kv_on_update="keep", prompts_per_step=512)
    devices: tuple[Device, ...] = tuple(
        replace(d, region=REGIONS[d.node]) for d in p.cluster.devices if d.node != without
    )
    cluster: Cluster = replace(p.cluster, devices=devices, regions={("x", "y"): GOOD, ("y", "z"): GOOD, ("x", "z"): xz})
    pins = tuple(
        Override(device=d.id, kind="pin", role="train" if d.region == "x" else "rollout") for d in cluster.devices
    )
    found: Problem = replace(p, cluster=cluster, overrides=pins)
    return found


@pytest.mark.parametrize("update", ["rolling", "pause", "overlapped"])
def test_a_relayed_update_is_as_long_as_predicted(update: UpdateMode) -> None:
    p = far_flung(update)
    timeline = Timeline()
    run = simulate(p, None, Options(steps=20), timeline=timeline)
    assert run.predicted is not None
    assert run.steady_step_s == pytest.approx(run.predicted.step_s, rel=0.05)
    # Of the whole way 0.01 s a hop are latency; a transfer that meets another on a link is longer.
    tracks = {e["tid"]: e["args"]["name"] for e in timeline.events() if e["name"] == "thread_name"}
    sent = [e for e in timeline.events() if e.get("name", "").startswith("weights")]
    assert {tracks[e["tid"]] for e in sent} == {"x to y"}, "y to z is as wide: nobody waits for it"
    assert min(e["dur"] for e in sent) / 1e6 >= run.predicted.update_s * (1 - 1e-6) - GOOD.latency_s
    assert max(e["dur"] for e in sent) / 1e6 == pytest.approx(run.predicted.update_s, rel=1e-3)


def test_a_direct_link_as_good_as_the_way_round_changes_nothing_but_the_latency() -> None:
    slow, fast = (simulate(far_flung("pause", xz=link), None, Options(steps=12)) for link in (POOR, GOOD))
    assert slow.predicted is not None
    assert fast.predicted is not None
    assert slow.predicted.update_s - fast.predicted.update_s == pytest.approx(GOOD.latency_s)
    assert slow.steady_step_s == pytest.approx(fast.steady_step_s, rel=0.01)


def test_without_its_relay_a_region_is_served_over_the_poor_link() -> None:
    p = far_flung("pause")
    whole, lost = (simulate(x, None, Options(steps=12)) for x in (p, far_flung("pause", without="c")))
    assert whole.predicted is not None
    assert lost.predicted is not None
    size_s = p.model.weight_bytes / 0.2
    assert lost.predicted.update_s - whole.predicted.update_s == pytest.approx(
        size_s / POOR.bytes_per_s - size_s / GOOD.bytes_per_s + POOR.latency_s - 2 * GOOD.latency_s
    )
    assert lost.steady_step_s == pytest.approx(lost.predicted.step_s, rel=0.05)


def test_paths_follow_the_plan() -> None:
    import planner

    p = far_flung("rolling")
    found = planner.solve(p)
    assert isinstance(found, Feasible)
    physics = Physics(p)
    paths = {r.devices: physics.path(r, found.plan) for r in found.plan.rollouts}
    assert {path.link for path in paths.values()} == {"x to y"}
    z = tuple(r for r in found.plan.rollouts if r.devices[0].startswith("d"))
    alone = replace(found.plan, placements=(found.plan.train, *z))
    assert physics.path(z[0], alone).link == "x to z"
    assert physics.path(z[0], alone).bytes_per_s < paths[z[0].devices].bytes_per_s
    scored = CostModel(p).evaluate(alone)
    assert scored is not None
    path = physics.path(z[0], alone)
    assert path.fixed_s + path.size_bytes / path.bytes_per_s == pytest.approx(scored.prediction.update_s)
