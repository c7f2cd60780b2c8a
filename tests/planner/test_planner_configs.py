"""From configuration to problem, and the shipped planning examples."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from planner import CATALOGUE, Capabilities, Feasible, Problem, device_kind, solve, violations
from planner.errors import UnknownName
from planner.model import load_model_spec
from planner.override import Override
from planner.record import replace
from runtime.config.problem import cluster_from_config, problem_from_config
from runtime.config.schema import Config
from runtime.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"source": "shape", "path": "models/r1-distill-qwen-1.5b.json"},
        "lengths": {"response_max": 64},
        "fleet": {"source": "declared", "devices": [{"kind": "H20", "count": 2}]},
    }
    return Config.model_validate({**base, **changes})


def shipped(name: str, model: str = "") -> Problem:
    c = Config.model_validate(tomllib.loads((CONFIGS / name).read_text()))
    path = CONFIGS / (model or c.model.path)
    return problem_from_config(c, cluster_from_config(c), load_model_spec(path))


def fleet(**section: Any) -> Config:
    return config(fleet=section)


def test_declared_devices_are_counted_by_machine() -> None:
    c = fleet(
        source="declared",
        devices=[
            {"kind": "H20", "count": 10, "per_node": 4, "node": "a{i}"},
            {"kind": "H800", "count": 1, "node": "a0"},
            {"kind": "H20", "count": 4, "per_node": 4, "node": "a{i}", "region": "far"},
        ],
    )
    devices = cluster_from_config(c).devices
    assert [d.id for d in devices[:5]] == ["a0/gpu0", "a0/gpu1", "a0/gpu2", "a0/gpu3", "a1/gpu0"]
    assert [d.id for d in devices[8:11]] == ["a2/gpu0", "a2/gpu1", "a0/gpu4"]
    assert [(d.node, d.region) for d in devices[11:]] == [("a3", "far")] * 4
    assert len({d.id for d in devices}) == 15


def test_paced_devices_have_ids_and_kinds_of_their_own() -> None:
    kinds = {
        "fast": {"peak_flops": "5 GFLOP/s", "hbm": "8 MB/s", "memory": "64 MB", "link": "10 MB/s", "launch": "10 ms"}
    }
    c = fleet(source="paced", pacing="not-read.toml", kinds=kinds, devices=[{"kind": "fast", "count": 2}])
    cluster = cluster_from_config(c)
    assert [d.id for d in cluster.devices] == ["paced-n0-0", "paced-n0-1"]
    assert cluster.kinds["fast"].paced
    assert cluster.kinds["fast"].launch_s == 0.01
    assert cluster.kinds["fast"].price_usd_per_h is None


def test_a_cpu_without_devices_is_one_device() -> None:
    cluster = cluster_from_config(fleet(source="cpu"))
    assert [(d.id, d.kind) for d in cluster.devices] == [("cpu-n0-0", "host-cpu")]


def test_prices_and_links_override_the_catalogue() -> None:
    c = fleet(
        source="declared",
        devices=[{"kind": "H20"}, {"kind": "L4"}],
        prices={"H20": 0, "L4": 0.4},
        same_kind={"bandwidth": "40 Gbit/s"},
    )
    cluster = cluster_from_config(c)
    assert cluster.kinds["H20"].price_usd_per_h == 0
    assert cluster.kinds["L4"].price_usd_per_h == 0.4
    assert cluster.same_kind.bytes_per_s == cluster.cross_kind.bytes_per_s == 5e9


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"source": "auto"}, "only known where it runs"),
        ({"source": "declared", "devices": [{"kind": "H21"}]}, "unknown device kind"),
        ({"source": "declared", "devices": [{"kind": "H20"}], "prices": {"H21": 1}}, "price of an unknown kind"),
        ({"source": "declared", "devices": [{"kind": "H20", "count": 9, "per_node": 8}]}, "numbered names"),
        ({"source": "paced", "pacing": "x.toml", "devices": [{"kind": "H20"}]}, "unknown device kind"),
    ],
)
def test_a_fleet_that_makes_no_sense(section: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        cluster_from_config(config(fleet=section))


def test_a_mean_above_the_longest() -> None:
    c = config(lengths={"response_mean": 100, "response_max": 50})
    with pytest.raises(ConfigError, match=r"lengths\.response_mean"):
        problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path))


def test_everything_reaches_the_problem() -> None:
    c = config(
        algorithm={"mode": "sync", "eta": 7, "prompts_per_step": 3, "responses_per_prompt": 5, "objective": "ppo"},
        planner={"objective": "throughput_per_dollar", "floor_tokens_per_s": 9, "capabilities": "runtime"},
        run={"seed": 11},
        model={"source": "pretrained", "path": "models/r1-distill-qwen-1.5b.json", "rollout_dtype": "float32"},
        sampling={"max_running": 7},
    )
    said = (Override(device="n0/gpu0", kind="cordon"),)
    p = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path), overrides=said)
    assert (p.workload.mode, p.workload.eta, p.workload.samples_per_step) == ("sync", 0, 15)
    assert (p.workload.proximal_forward, p.workload.response.max_tokens) == (False, 64)
    assert p.capabilities == replace(Capabilities.single_device_roles(), rollout_max_running=7)
    assert (p.objective, p.floor_tokens_per_s, p.seed) == ("throughput_per_dollar", 9, 11)
    assert p.model.dtype_bytes == 4
    assert p.overrides == said


def test_the_catalogue_names_its_sources() -> None:
    assert all(k.source for k in CATALOGUE.values())
    assert all(name == k.name for name, k in CATALOGUE.items())
    assert device_kind("H800").price_usd_per_h == 5.28
    with pytest.raises(UnknownName, match="H800"):
        device_kind("H801")


def kinds_of(p: Problem, found: Feasible) -> tuple[set[str], set[str]]:
    assert found.plan.train is not None
    train = {p.cluster.kind_of(d).name for d in found.plan.train.devices}
    return train, {r.kind for r in found.plan.rollouts}


@pytest.mark.parametrize("gpus", [24, 32, 48, 56])
def test_areal_hex_fleets(gpus: int) -> None:
    """H800 trains and H20 generates; where H800 are many, some of them help to generate."""
    p = shipped(f"areal-hex-{gpus}.toml")
    assert len(p.cluster.devices) == gpus
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.gap < 0.05
    train, roll = kinds_of(p, found)
    assert train == {"H800"}
    if gpus == 24:
        return
    assert "H20" in roll
    used = {d for q in found.plan.placements for d in q.devices}
    assert len(used) == gpus, "nothing idles"
    if gpus != 48:
        assert roll == {"H20"}
        assert sum(p.cluster.kind_of(d).name == "H800" for d in found.plan.train.devices) == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("size", ["1.5b", "14b"])
def test_areal_hex_fleet_with_the_other_models(size: str) -> None:
    p = shipped("areal-hex-32.toml", f"models/r1-distill-qwen-{size}.json")
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert kinds_of(p, found) == ({"H800"}, {"H20"})


def test_the_local_fleet_is_planned_exactly() -> None:
    p = shipped("local.toml")
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.gap < 1e-6
    assert found.bound_scope.startswith("exact")
    assert kinds_of(p, found)[0] == {"fast"}
    assert 0.1 < found.prediction.step_s < 5
