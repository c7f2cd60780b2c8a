"""docs/guides/fleets.md: its example loads, and its table names the ready files."""

import re
import tomllib
from pathlib import Path

from planner.cluster import Link
from runtime.config.problem import cluster_from_config
from runtime.config.schema import Config

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/fleets.md").read_text()


def test_the_example_is_a_fleet() -> None:
    text = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)[0]
    tree = {"model": {"source": "shape", "path": "x.json"}, **tomllib.loads(text)}
    c = cluster_from_config(Config.model_validate(tree))
    assert [d.node for d in c.devices] == ["h100-0"] * 8 + ["h100-1"] * 8 + ["l40s"] * 7
    assert c.link(c.devices[0], c.devices[-1]) == Link(
        latency_s=0.038, bytes_per_s=1.05e9 / 8, streams=4, egress_usd_per_gb=0.02
    )
    assert c.kinds["H100"].price_usd_per_h == 2.10


def test_every_planning_file_is_in_the_table() -> None:
    table = GUIDE.split("## Ready files")[1]
    for path in (ROOT / "configs").glob("*.toml"):
        if tomllib.loads(path.read_text())["model"]["source"] == "shape":
            assert path.stem in table or f"`-{path.stem.rsplit('-', 1)[1]}`" in table, path.stem
