"""Links, regions and what only the planner can do, from the file to the planner's values."""

import re
import tomllib
from pathlib import Path

import pytest

from planner.catalogue import CATALOGUE
from planner.cluster import PART_LINK_BYTES_PER_S, Cluster, Link
from planner.errors import InvalidInput
from planner.model import load_model_spec
from planner.record import replace
from runtime.config.load import load_config, need_runnable, resolved_toml
from runtime.config.problem import cluster_from_config, problem_from_config, workload_from_config
from runtime.config.schema import Config
from runtime.errors import ConfigError

HEAD = """\
[model]
source = "shape"
path = "model.json"
[algorithm]
name = "grpo"
[planner]
capabilities = "unrestricted"
[lengths]
response_max = 64
[[fleet.devices]]
kind = "H100"
node = "a"
region = "us-east"
[[fleet.devices]]
kind = "H100"
node = "b"
region = "us-west"
[[fleet.devices]]
kind = "L4"
node = "c"
region = "eu-west"
[fleet]
source = "declared"
"""
PAIR = '[[fleet.regions]]\nbetween = ["us-west", "us-east"]\nround_trip = "68 ms"\nbandwidth = "1 Gbit/s"\n'
TAIL = HEAD.count("\n")  # lines before what a test adds


def written(folder: Path, text: str) -> Path:
    (folder / "model.json").write_text("{}")
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def config(text: str) -> Config:
    return Config.model_validate(tomllib.loads(HEAD + text))


def cluster(text: str) -> Cluster:
    return cluster_from_config(config(text))


def test_latency_is_one_way_and_a_round_trip_is_halved() -> None:
    c = cluster(
        'intra_node_latency = "3 us"\nsame_kind = { bandwidth = "40 Gbit/s", latency = "50 us" }\n'
        'cross_kind = { bandwidth = "10 Gbit/s", round_trip = "50 us" }\n' + PAIR
    )
    assert c.intra_node_latency_s == pytest.approx(3e-6)
    assert c.same_kind.latency_s == pytest.approx(5e-5)
    assert c.cross_kind.latency_s == pytest.approx(2.5e-5)
    assert c.regions[("us-east", "us-west")].latency_s == pytest.approx(0.034)


def test_a_pair_of_regions_serves_both_directions_and_the_rest_take_the_default() -> None:
    far = 'cross_region = { bandwidth = "300 Mbit/s", latency = "45 ms", streams = 8, egress_usd_per_gb = 0.05 }\n'
    c = cluster(far + PAIR + "streams = 5\negress_usd_per_gb = 0.02\n")
    east, west, europe = c.devices
    link = Link(latency_s=0.034, bytes_per_s=1.25e8, streams=5, egress_usd_per_gb=0.02)
    assert c.link(east, west) == c.link(west, east) == link
    assert c.link(east, europe) == Link(latency_s=0.045, bytes_per_s=3.75e7, streams=8, egress_usd_per_gb=0.05)
    assert (
        cluster("").cross_region
        == Cluster(kinds=c.kinds, devices=c.devices, same_kind=c.same_kind, cross_kind=c.cross_kind).cross_region
    ), "what the documentation calls the default is the planner's"


REGION = '[[fleet.regions]]\nbetween = ["us-east", "us-west"]\n'
TYPO = REGION.replace("us-west", "us-wets")
NONSENSE = [
    (TYPO + 'round_trip = 1\nbandwidth = 1\n', "fleet.regions.0.between: unknown region", "did you mean us-west?", 2),
    (REGION.replace("us-west", "mars") + 'round_trip = 1\nbandwidth = 1\n', "unknown region", "named by fleet.devices.region", 2),
    (REGION.replace("us-west", "us-east") + 'round_trip = 1\nbandwidth = 1\n', "paired with itself", "fleet.same_kind", 2),
    (REGION + 'round_trip = 1\nbandwidth = 1\n' + PAIR, "fleet.regions.1.between: the same pair of regions twice", "both directions", 6),
    (REGION + 'round_trip = 1\nbandwidth = "0 Gbit/s"\n', "fleet.regions.0.bandwidth: bad value", "greater than 0", 4),
    (REGION + 'round_trip = 1\nbandwidth = nan\n', "fleet.regions.0.bandwidth: not a finite number", "got nan", 4),
    (REGION + 'round_trip = "-1 ms"\nbandwidth = 1\n', "fleet.regions.0.round_trip: bad value", "greater than or equal to 0", 3),
    (REGION + 'round_trip = 1\nbandwidth = 1\nstreams = 0\n', "fleet.regions.0.streams: bad value", "got 0", 5),
    (REGION + 'round_trip = 1\nbandwidth = 1\negress_usd_per_gb = -0.1\n', "fleet.regions.0.egress_usd_per_gb: bad value", "got -0.1", 5),
    (REGION + 'round_trip = 1\nbandwidth = 1\nlatency = 1\n', "fleet.regions.0: latency and round_trip are both given", "", 1),
    (REGION + 'bandwidth = 1\n', "fleet.regions.0: latency or round_trip is needed between regions", "", 1),
    (REGION + 'round_trip = 1\n', "fleet.regions.0.bandwidth: missing", "one stream", 1),
    ('[[fleet.regions]]\nbetween = ["us-east"]\nround_trip = 1\nbandwidth = 1\n', "fleet.regions.0.between.1: missing", "", 2),
    ('cross_region = { bandwidth = 1 }\n', "fleet.cross_region: latency or round_trip is needed", "", 1),
    ('same_kind = { bandwidth = "10 GB" }\n', "fleet.same_kind.bandwidth: not a bandwidth", "got '10 GB'", 1),
    ('same_kind = { bandwidth = 1, egress_usd_per_gb = 1 }\n', "fleet.same_kind.egress_usd_per_gb: unknown key", "known here", 1),
    ('intra_node_latency = "fast"\n', "fleet.intra_node_latency: not a duration", "got 'fast'", 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "more", "line"), NONSENSE, ids=[n[1] for n in NONSENSE])
def test_links_that_make_no_sense(tmp_path: Path, text: str, what: str, more: str, line: int) -> None:
    path = written(tmp_path, HEAD + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert what in message
    assert more in message
    assert f"{path}:{TAIL + line}: " in message


def test_regions_survive_the_copy_in_a_run_folder(tmp_path: Path) -> None:
    far = 'cross_region = { bandwidth = "1 GB/s", round_trip = "90 ms" }\n'
    loaded = load_config(written(tmp_path, HEAD + far + PAIR + "streams = 3\n"))
    (tmp_path / "copy.toml").write_text(resolved_toml(loaded))
    again = load_config(tmp_path / "copy.toml")
    assert again.sha256 == loaded.sha256
    assert cluster_from_config(again.config) == cluster_from_config(loaded.config)


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_s": float("nan")}, {"latency_s": -1.0}, {"bytes_per_s": 0.0}, {"bytes_per_s": float("nan")},
        {"bytes_per_s": float("inf")}, {"streams": 0}, {"egress_usd_per_gb": -1.0}, {"egress_usd_per_gb": float("nan")},
    ],
)  # fmt: skip
def test_a_link_refuses_what_is_no_figure(changes: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="link"):
        replace(Link(latency_s=0.0, bytes_per_s=1.0), **changes)


def test_a_cluster_refuses_a_pair_that_would_never_be_found() -> None:
    with pytest.raises(InvalidInput, match="sorted pairs"):
        replace(cluster(""), regions={("us-west", "us-east"): Link(latency_s=0.0, bytes_per_s=1.0)})
    with pytest.raises(InvalidInput, match="intra_node_latency_s"):
        replace(cluster(""), intra_node_latency_s=float("nan"))


ONLY_PLANNED = {
    "name": '"ppo"',
    "reference_model": "true",
    "reward_model": "true",
    "update_mode": '"pause"',
    "kv_on_update": '"keep"',
}


def test_what_only_the_planner_knows_is_planned() -> None:
    text = HEAD.replace('name = "grpo"', "\n".join(f"{k} = {v}" for k, v in ONLY_PLANNED.items()))
    w = workload_from_config(Config.model_validate(tomllib.loads(text)))
    assert (w.algorithm, w.reference_model, w.update_mode, w.kv_on_update) == ("ppo", True, "pause", "keep")


def test_the_time_of_a_rule_reaches_the_plan_and_stops_no_run() -> None:
    text = HEAD.replace('name = "grpo"', 'name = "grpo"\nreward_time = "250 ms"')
    assert workload_from_config(Config.model_validate(tomllib.loads(text))).reward_s_per_sample == 0.25


def test_declared_cards_are_planned_in_parts_where_the_file_says_so() -> None:
    """The card of each of three machines is two devices, with the links that the cards have."""
    found = cluster("gpu_parts = 2\n")
    assert [(d.id, d.kind, d.node, d.index) for d in found.devices] == [
        (f"{node}/gpu0:{i}of2", f"{card} 1/2", node, i - 1)
        for node, card in (("a", "H100"), ("b", "H100"), ("c", "L4"))
        for i in (1, 2)
    ]
    assert found.kinds.keys() == {"H100 1/2", "L4 1/2"}
    assert found.kinds["L4 1/2"].memory_bytes == CATALOGUE["L4"].memory_bytes / 2
    a, b = found.device("a/gpu0:1of2"), found.device("b/gpu0:1of2")
    assert found.link(a, b) == found.cross_region
    assert found.link(a, found.device("a/gpu0:2of2")).bytes_per_s == PART_LINK_BYTES_PER_S


@pytest.mark.parametrize("key", ONLY_PLANNED)
def test_and_a_run_with_it_is_refused(tmp_path: Path, key: str) -> None:
    text = HEAD.replace('name = "grpo"', f"{key} = {ONLY_PLANNED[key]}")
    loaded = load_config(written(tmp_path, text))
    with pytest.raises(ConfigError, match=rf"for planning only.*algorithm\.{key} = ") as caught:
        need_runnable(loaded)
    assert sum(f"algorithm.{k} = " in str(caught.value) for k in ONLY_PLANNED) == 1


def test_ppo_is_not_planned_for_what_a_run_can_do(tmp_path: Path) -> None:
    text = HEAD.replace('"grpo"', '"ppo"').replace('"unrestricted"', '"runtime"')
    with pytest.raises(ConfigError, match=re.escape("run.toml:5: algorithm.name: hexctl up runs grpo only")) as caught:
        load_config(written(tmp_path, text))
    assert caught.value.hint == 'to plan ppo set planner.capabilities = "unrestricted"'


def test_streams_and_distance_reach_the_prediction() -> None:
    """Two machines of one kind in two regions: one trains, one generates, and the weights cross."""
    from planner import Feasible, solve

    shape = load_model_spec(Path(__file__).parents[2] / "configs/models/qwen2.5-0.5b.json")
    fleet = HEAD.replace('kind = "L4"\nnode = "c"\nregion = "eu-west"\n', "").replace(
        "[[fleet.devices]]\n[fleet]", "[fleet]"
    )

    def update_s(pair: str) -> float:
        c = Config.model_validate(tomllib.loads(fleet + pair))
        found = solve(problem_from_config(c, cluster_from_config(c), shape))
        assert isinstance(found, Feasible)
        return found.prediction.update_s

    one, four = update_s(PAIR), update_s(PAIR + "streams = 4\n")
    size, share = shape.weight_bytes, 0.2  # of the link, Assumptions.update_efficiency
    assert one - four == pytest.approx(size / (1.25e8 * share) * 3 / 4, rel=1e-9)
    assert update_s(PAIR.replace("68 ms", "168 ms")) - one == pytest.approx(0.05, rel=1e-6)
