"""vLLM itself in its process: where it listens, and that a replica killed with -9 in mid-decode leaves nothing of it."""

import importlib.util
import ipaddress
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends.ray.procs import Watched, group_members

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.kill,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (docs/gpu.md)"),
]
REPLICA = """
import sys, tempfile
from pathlib import Path
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.types import Lease, SampleId
from tests.rl.test_engine_contract import RAW, generations

if __name__ == "__main__":
    spec = VllmSpec(
        model=RAW, slots=4, max_length=128, eos_ids=frozenset(), seed=1, batched_tokens=512, eager=True
    )
    made = VllmEngine(spec)
    made.load_weights(generations(Path(sys.argv[1]))[0])
    samples = [Lease(sample=SampleId(g, 0), epoch=1, prompt_tokens=(3, 4), max_new_tokens=120) for g in range(64)]
    made.add(samples)
    tokens = sum(len(a.tokens) for _ in range(5) for a in made.step())
    print(made.process_group, tokens, flush=True)
    while True:
        made.step()
"""


def listening(pids: set[int]) -> set[str]:
    """Addresses on which these processes listen for TCP, or receive UDP."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table, width in (("tcp", 4), ("tcp6", 16), ("udp", 4), ("udp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or table.startswith("udp")):
                words = bytes.fromhex(fields[1].split(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, width, 4))
                found.add(str(ipaddress.ip_address(raw)))
    return found


def test_it_listens_on_loopback_only_and_ends_with_a_killed_replica(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "weights")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        assert replica.stdout is not None
        group, tokens = map(int, replica.stdout.readline().split())
        assert tokens > 0
        members = group_members(group)
        assert len(members) >= 2
        assert all(ipaddress.ip_address(a).is_loopback for a in listening({m.pid for m in members}))
        with Watched(members) as watched:
            os.kill(replica.pid, signal.SIGKILL)
            assert watched.wait(10.0) == ()
        assert group_members(group) == ()
    finally:
        replica.kill()
        replica.wait(10.0)
