"""vLLM itself in its process: where it listens, and that a replica killed with -9 in mid-decode leaves nothing of it."""

import ipaddress
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends.ray.procs import Watched, group_members
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from tests.rl.test_engine_contract import (
    CLOSE,
    NEEDS_VLLM,
    RAW,
    TEMPERATURE,
    drive,
    generations,
    lease,
    worst_difference,
)

pytestmark = [*NEEDS_VLLM, pytest.mark.kill]
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
            assert watched.wait(60.0) == ()
        assert group_members(group) == ()
    finally:
        replica.kill()
        replica.wait(60.0)


def test_keep_leaves_running_samples_their_kv(tmp_path: Path) -> None:
    """No prefill at the update; tokens after it are the new weights' over old KV: not what a forward of theirs alone gives,
    which it is again for a sample that comes later, whatever the prefix cache holds."""
    engine = VllmEngine(
        VllmSpec(
            model=RAW,
            slots=4,
            max_length=128,
            eos_ids=frozenset(),
            seed=1,
            temperature=TEMPERATURE,
            batched_tokens=512,
            eager=True,
            kv_on_update="keep",
        )
    )
    try:
        refs = generations(tmp_path)
        engine.load_weights(refs[0])
        leases = [lease(5, m, longest=60) for m in range(3)]
        engine.add(leases)
        trace = drive(engine, {}, tokens=60)
        prefilled = engine.stats().prefill_tokens
        engine.load_weights(refs[1])
        drive(engine, trace)
        assert engine.stats().prefill_tokens == prefilled
        later = lease(5, 9, longest=20)
        engine.add([later])
        drive(engine, trace)
    finally:
        engine.close()
    for one in leases:
        appends = trace[one.sample]
        old = [a for a in appends if a.version == 0]
        assert {a.version for a in appends} == {0, 1}
        assert sum(len(a.tokens) for a in appends) == 60
        assert worst_difference(one, old) < CLOSE
        assert worst_difference(one, appends) > 100 * CLOSE
    assert worst_difference(later, trace[later.sample]) < CLOSE
