"""One actor a node, for real: answers, failures and deadlines, and a whole profile of a cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray_world import RayWorld

from planner.calibration import decode

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from runtime.backends.ray import cluster
from runtime.backends.ray.per_node import nodes, run_on
ray = cluster.connect(sys.argv[1], "per-node-test", token=None)
[node] = nodes(ray)
said = []
def one(name, deadline_s=60.0):
    [answer] = run_on(ray, {node: (f"node_doubles:{name}", 5)}, deadline_s=deadline_s, on_said=lambda n, s: said.append(s))
    return [answer.result, answer.failure]
found = {name: one(name) for name in ("echo", "fails", "dies")}
found["never"] = one("never", deadline_s=2.0)
print(json.dumps(found))
"""


@pytest.mark.ray
def test_every_way_a_node_can_answer(ray_world: RayWorld) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ray_world.head.address],
        env=ray_world.env(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["echo"][0]["argument"] == 5
    assert found["echo"][1] == ""
    assert found["fails"] == [None, "ValueError: no such card"]
    assert found["dies"][0] is None
    assert found["dies"][1] != ""
    assert found["never"] == [None, "not done within 2 s"]


@pytest.mark.ray
def test_the_profile_of_a_cluster(ray_world: RayWorld, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "runtime.profile", "--quick", "--only", "copy", "--out", str(out)]
    env = {**ray_world.env(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [node] = json.loads(done.stdout)["nodes"]
    assert (node["failure"], node["kinds"]) == ("", ["host-cpu"])
    assert decode(out.read_text()).kinds[0].hbm_copy
    dry = subprocess.run(
        [*command, "--dry-run"], env=env, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert dry.returncode == 0, dry.stderr
    assert [i["part"] for i in json.loads(dry.stdout)["nodes"][0]["items"]] == ["copy"]
