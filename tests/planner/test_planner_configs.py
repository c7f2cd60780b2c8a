"""From configuration to problem, and the shipped planning examples."""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner import CATALOGUE, Budget, Capabilities, Feasible, Problem, device_kind, solve, violations
from planner.cost.model import CostModel
from planner.cost.network import best_link
from planner.cost.update import update_s
from planner.errors import UnknownName
from planner.model import load_model_spec
from planner.override import Override
from planner.record import replace
from runtime.config.problem import LONG, ROW_CEILING, cluster_from_config, problem_from_config
from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.model import attention as torch_attention
from runtime.rl.train import room

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
    ranks = replace(
        Capabilities.single_device_roles(),
        train_max_devices=None,
        trainer="fsdp",
        train_row_tokens=ROW_CEILING,
        direct_updates=True,
    )
    assert p.capabilities == replace(ranks, rollout_max_running=7)
    assert room.ROW_CEILING == ROW_CEILING, "written twice, as one of them is beside an import of torch"
    assert (p.objective, p.floor_tokens_per_s, p.seed) == ("throughput_per_dollar", 9, 11)
    assert p.model.dtype_bytes == 4
    assert p.overrides == said


@pytest.mark.parametrize(
    ("source", "engine", "block"), [("declared", "vllm", 16), ("cpu", "vllm", 32), ("declared", "torch", None)]
)
def test_a_group_shares_its_prompt_where_the_engine_does(source: str, engine: str, block: int | None) -> None:
    devices = [{"kind": "host-cpu" if source == "cpu" else "H100", "count": 2}]
    c = config(
        planner={"capabilities": "runtime"},
        fleet={"source": source, "devices": devices},
        rollout={"engine": engine},
        model={"source": "pretrained", "path": "models/r1-distill-qwen-1.5b.json"},
    )
    caps = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path)).capabilities
    assert caps.rollout_prefix_block == block


@pytest.mark.parametrize(
    ("path", "kinds", "direct"),
    [
        ("auto", ("H100",), True),
        ("auto", ("H100", "L40S"), False),
        ("direct", ("H100", "L40S"), True),
        ("store", ("H100",), False),
        ("auto", ("host-cpu",), False),
    ],
)
def test_weights_go_straight_to_engines_as_the_run_sends_them(path: str, kinds: tuple[str, ...], direct: bool) -> None:
    devices = [{"kind": k, "count": 2} for k in kinds]
    fleet = {"source": "cpu" if kinds == ("host-cpu",) else "declared", "devices": devices}
    c = config(planner={"capabilities": "runtime"}, fleet=fleet, weights={"path": path})
    caps = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path)).capabilities
    assert caps.direct_updates == direct


@pytest.mark.parametrize(
    ("attention", "prompt", "response", "kernel"),
    [
        ("auto", 48, 2000, "cudnn"),  # 2,048 tokens, from which our trainer takes it
        ("auto", 47, 2000, "flash_2"),
        ("by_length", 100, 4000, "cudnn"),
        ("varlen", 100, 4000, "flash_2"),
        ("cudnn", 10, 20, "cudnn"),
    ],
)
def test_plans_take_the_attention_kernel_of_our_trainer(
    attention: str, prompt: int, response: int, kernel: str
) -> None:
    lengths = {"prompt_mean": prompt, "prompt_max": 100, "response_mean": response, "response_max": 8000}
    c = config(lengths=lengths, trainer={"attention": attention}, planner={"capabilities": "runtime"})
    p = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path))
    assert p.capabilities.train_attention == kernel
    assert torch_attention.LONG == LONG, "written twice, as one of them is beside an import of torch"


def test_ranks_of_two_kinds_and_deltas_are_planned_where_the_file_says_so() -> None:
    def said(**planner: Any) -> Capabilities:
        c = config(planner=planner)
        return problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path)).capabilities

    assert said(capabilities="unrestricted", mixed_ranks=True).train_mixed_dp
    assert not said(capabilities="unrestricted").train_mixed_dp
    assert not said(capabilities="runtime").train_mixed_dp
    assert said(capabilities="runtime", mixed_ranks=True).train_mixed_dp
    assert said(capabilities="unrestricted", weights_full_every=16).weights_full_every == 16
    assert said(capabilities="runtime").weights_full_every == 1
    for path, world, every in (("store", 1, 8), ("store", 2, 1), ("auto", 1, 1), ("direct", 1, 1)):
        c = config(
            weights={"path": path, "full_every": 8}, trainer={"max_world": world}, planner={"capabilities": "runtime"}
        )
        caps = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path)).capabilities
        assert caps.weights_full_every == every
    with pytest.raises(ValueError, match="weights_full_every needs"):
        config(planner={"capabilities": "runtime", "weights_full_every": 2})


@pytest.mark.parametrize(
    ("source", "trainer", "most"),
    [
        ("declared", {}, None),
        ("declared", {"max_world": 4}, 4),
        ("paced", {}, 1),
        ("cpu", {}, 1),
        ("cpu", {"max_world": 2}, 2),
    ],
)
def test_a_run_plans_as_many_trainer_ranks_as_it_can_start(
    source: str, trainer: dict[str, Any], most: int | None
) -> None:
    """Paced devices and CPUs share one host: there is one rank unless the file says more."""
    kinds = {"slow": {"peak_flops": "1 GFLOP/s", "hbm": "1 GB/s", "memory": "1 GB", "link": "1 GB/s"}}
    devices = [{"kind": "H100" if source == "declared" else "slow" if source == "paced" else "host-cpu", "count": 3}]
    fleet = {"source": source, "devices": devices, "kinds": kinds, "pacing": "p.toml" if source == "paced" else None}
    c = config(planner={"capabilities": "runtime", "mixed_ranks": True}, fleet=fleet, trainer=trainer)
    caps = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path)).capabilities
    assert (caps.train_max_devices, caps.train_max_tp, caps.train_max_pp) == (most, 1, 1)
    assert (caps.trainer, caps.train_mixed_dp) == (("replicated", False) if most == 1 else ("fsdp", True))


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


@pytest.mark.parametrize("name", ["hetrl-s1.toml", "hetrl-s2.toml"])
def test_a_fleet_whose_tasks_and_replicas_share_memory_is_near_its_bound(name: str) -> None:
    """The fastest groups leave replicas too little memory: in one region those that leave more come first, and the bound knows
    of it everywhere."""
    found = solve(shipped(name))
    assert isinstance(found, Feasible)
    assert violations(found.plan, shipped(name)) == ()
    assert found.gap < 0.03


def test_the_local_fleet_is_planned_exactly() -> None:
    p = shipped("local.toml")
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.gap < 1e-6
    assert found.bound_scope.startswith("exact")
    assert kinds_of(p, found)[0] == {"fast"}
    assert 0.1 < found.prediction.step_s < 5


HETRL = {"A100-40": 24, "L40S": 24, "L4": 16}
# What the file says, in figures: GPUs by kind, machines, regions.
READY: dict[str, tuple[dict[str, int], int, int]] = {
    "hetrl-s1": (HETRL, 8, 1),
    "hetrl-s2": (HETRL, 8, 4),
    "hetrl-s3": (HETRL, 8, 8),
    "hetrl-s4": (HETRL, 8, 8),
    "rtx4090-8": ({"RTX-4090": 8}, 1, 1),
    "rtx3090-2-rtx4090-1": ({"RTX-3090": 2, "RTX-4090": 1}, 1, 1),
    "a100-4-l40s-8": ({"A100-80": 4, "L40S": 8}, 2, 1),
    "h100-8-l4-8": ({"H100": 8, "L4": 8}, 9, 1),
    "h100-7": ({"H100": 7}, 1, 1),
    "h800-8-h20-16": ({"H800": 8, "H20": 16}, 3, 1),
    "spot-a10g-l4-t4": ({"A10G": 4, "L4": 4, "T4": 4}, 12, 2),
    "a100-16-v100-8": ({"A100-40": 16, "V100-16": 8}, 3, 1),
    "h100-8-a100-8-two-regions": ({"H100": 8, "A100-80": 8}, 2, 2),
    "rtx-pro-6000-4-rtx4090-8": ({"RTX-PRO-6000": 4, "RTX-4090": 8}, 2, 1),
    "laptop": ({"host-cpu": 2}, 1, 1),
    "h100-64-h20-64": ({"H100": 64, "H20": 64}, 16, 1),
}
SLOW = {"hetrl-s1", "hetrl-s2", "hetrl-s4", "h100-64-h20-64"}  # half a minute each on two busy cores


@pytest.mark.parametrize("name", READY)
def test_a_ready_file_says_what_its_name_says(name: str) -> None:
    p = shipped(f"{name}.toml")
    kinds, machines, regions = READY[name]
    assert Counter(d.kind for d in p.cluster.devices) == kinds
    assert len({d.node for d in p.cluster.devices}) == machines
    assert len({d.region for d in p.cluster.devices}) == regions
    assert len(p.cluster.regions) == regions * (regions - 1) // 2, "every pair of regions is linked"
    text = (CONFIGS / f"{name}.toml").read_text()
    assert f"configs/{name}.toml" in text
    assert "assum" in text.lower(), "what is assumed is said"


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        pytest.param(n, s, marks=pytest.mark.accept if n in SLOW or (s != "hex" and n.startswith("hetrl")) else ())
        for n in READY
        for s in ("hex", "areal-hex")
    ],
)
def test_a_ready_file_plans(name: str, scheduler: str) -> None:
    p = shipped(f"{name}.toml")
    found = solve(p, scheduler=scheduler, budget=Budget(evaluations=20))
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-9)


def test_two_regions_share_a_run_where_steps_are_long_enough_for_the_weights_to_cross() -> None:
    p = shipped("h100-8-a100-8-two-regions.toml")
    found = solve(p)
    assert isinstance(found, Feasible)
    assert found.gap < 0.01, "a trainer in one region, and nothing taken for joined that is not"
    regions = {p.cluster.device(d).region for r in found.plan.rollouts for d in r.devices}
    assert regions == {"virginia", "ireland"}
    link = p.cluster.regions[("ireland", "virginia")]
    assert (link.streams, link.latency_s) == (4, pytest.approx(0.0849 / 2, rel=1e-3))


def test_hetrl_measured_links_are_not_clamped_to_the_papers_range() -> None:
    far = shipped("hetrl-s4.toml").cluster.regions
    assert far[("california", "stockholm")].latency_s == pytest.approx(0.174478 / 2)
    assert far[("london", "virginia")].bytes_per_s == pytest.approx(4.226e9 / 8)


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert load_model_spec(CONFIGS / "models" / f"{name}.json").params == PUBLISHED[name]


@pytest.mark.parametrize("path", sorted((CONFIGS / "markets").glob("*.toml")), ids=lambda p: p.stem)
def test_a_market_file_rents_what_the_catalogue_knows(path: Path) -> None:
    tree = tomllib.loads(path.read_text())
    assert tree.keys() <= {"market", "instances", "egress"}
    assert tree["market"].keys() == {"name", "source", "as_of"}
    needed = {"name", "region", "kind", "gpus", "price_usd_per_h"}
    for row in tree["instances"]:
        assert needed <= row.keys() <= needed | {"spot_usd_per_h", "available", "node_memory"}
        assert row["kind"] in CATALOGUE
        assert row["price_usd_per_h"] > 0
        assert 0 < row.get("spot_usd_per_h", row["price_usd_per_h"]) <= row["price_usd_per_h"]
        assert row["gpus"] >= 1
    places = [(row["name"], row["region"]) for row in tree["instances"]]
    assert len(set(places)) == len(places)
    pairs = [(row["from"], row["to"]) for row in tree.get("egress", [])]
    assert len(set(pairs)) == len(pairs)
    assert {r for pair in pairs for r in pair} <= {region for _, region in places}


def test_the_papers_market_has_the_papers_prices() -> None:
    tree = tomllib.loads((CONFIGS / "markets" / "areal-hex.toml").read_text())
    rates = {row["kind"]: row["price_usd_per_h"] / row["gpus"] for row in tree["instances"]}
    assert rates == {"H800": pytest.approx(5.28), "H20": pytest.approx(1.85)}


def test_memory_of_machines_is_said_beside_their_devices() -> None:
    def cluster(*sections: dict[str, Any]) -> Any:
        return cluster_from_config(config(fleet={"source": "declared", "devices": list(sections)}))

    two = {"kind": "H20", "count": 16, "per_node": 8, "node": "m{i}", "host_memory": "512 GB"}
    assert cluster(two, {"kind": "H100", "node": "x"}).host_memory_bytes == {"m0": 512e9, "m1": 512e9}
    same = {"kind": "H20", "node": "y", "host_memory": "64 GB"}
    assert cluster(same, {**same, "kind": "H100"}).host_memory_bytes == {"y": 64e9}
    with pytest.raises(ConfigError, match="two amounts of memory"):
        cluster(same, {**same, "host_memory": "128 GB"})


def test_our_own_trainer_and_engine_have_floors_on_cards_that_nobody_measured() -> None:
    """Only in plans for what `hexctl up` runs: an exported plan is of another system."""
    base = {"model": {"source": "pretrained", "path": "models/r1-distill-qwen-1.5b.json"}}
    algorithm = {"objective": "decoupled", "micro_batch_tokens": 9000}
    for engine, floor in (({}, 1.5e-3), ({"engine": "vllm"}, 0.0), ({"engine": "vllm", "eager": True}, 6e-4)):
        c = config(**base, algorithm=algorithm, rollout=engine, planner={"capabilities": "runtime"})
        p = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path))
        kind = p.cluster.kinds["H20"]
        assert (kind.decode_floor_s, kind.train_floor_s, kind.train_fixed_s) == (floor, 1e-3, 0.1)
        assert p.capabilities.train_row_tokens == 9000
        assert not p.workload.proximal_forward, "one optimiser step a batch: the proximal policy is the current one"
    c = config(**base, algorithm=algorithm, planner={"capabilities": "unrestricted"})
    p = problem_from_config(c, cluster_from_config(c), load_model_spec(CONFIGS / c.model.path))
    assert p.cluster.kinds["H20"] == CATALOGUE["H20"]
    assert p.capabilities.train_row_tokens is None
    assert p.workload.proximal_forward


@pytest.mark.parametrize(
    ("name", "region", "direct_s", "relayed_s"),
    [
        ("hetrl-s4", "oregon", 93.1, 76.2),
        ("hetrl-s4", "virginia", 82.9, 76.2),
        ("hetrl-s3", "ireland", 72.5, 70.2),
        ("hetrl-s2", "virginia", 323.3, 323.3),
    ],
)
def test_weights_of_hetrls_scenarios_go_round_slow_links(
    name: str, region: str, direct_s: float, relayed_s: float
) -> None:
    """One region trains, all others generate: the table of docs/concepts/cost-model.md."""
    cost = CostModel(shipped(f"{name}.toml", "models/qwen3-4b.json"))
    at = [p for p in dict.fromkeys(cost.places.values()) if p.region != region]
    trainer = [p for p in dict.fromkeys(cost.places.values()) if p.region == region]
    paths = cost.arrivals(trainer, at)
    relayed = max(update_s(cost.context, p.kind, paths[p].link) for p in at)
    direct = max(update_s(cost.context, p.kind, best_link(cost.problem.cluster, tuple(trainer), (p,))) for p in at)
    assert direct == pytest.approx(direct_s, abs=0.06)
    assert relayed == pytest.approx(relayed_s, abs=0.06)
