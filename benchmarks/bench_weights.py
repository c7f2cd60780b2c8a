"""How long new weights take from a trainer's GPU into an engine on another one, straight through our own path.

    python -m benchmarks.bench_weights                                          # two GPUs: torch and vLLM, 1.5B and 7B shapes
    python -m benchmarks.bench_weights --engine vllm --shapes 7b --updates 8
    python -m benchmarks.bench_weights --device cpu --engine torch --shapes tiny-qwen3 --bucket 1000000

A trainer's process holds dummy weights of the shape and sends every update by `WeightsSender`; the engine's process generates all
the while and swaps each update in. Both use what a run uses; no Ray, no flow: what flow adds is the time to a replica's next
exchange, a quarter of a second at most, in which it goes on with the old weights. The link is measured first, in the same run, by
plain broadcasts of one buffer of the same size between two processes on the same devices.

    update      what the trainer waits (buffers ready, group, broadcast, checksums compared) and the engine's pause together
    goal        1.5 x bytes / measured bandwidth + 50 ms
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.weights_ends import (
    COMPILE_S,
    LAST,
    MODELS,
    START_S,
    engine,
    link,
    patience_s,
    trainer,
    weight_bytes,
)

GOAL_RATIO, GOAL_S = 1.5, 0.05


def goal_s(size: int, bytes_per_s: float) -> float:
    """Most seconds that an update should take."""
    return GOAL_RATIO * size / bytes_per_s + GOAL_S


class Child:
    """A role in a process of its own, on one visible GPU."""

    def __init__(self, role: str, shape: str, given: argparse.Namespace, gpu: int, *more: object) -> None:
        # What is of the shape and the engine comes in `more`.
        fixed = {k: getattr(given, k) for k in ("device", "dtype", "bucket", "updates", "sequences", "tokens", "share")}
        command = [sys.executable, "-m", "benchmarks.bench_weights", "--role", role, "--shape", shape]
        command += [str(x) for k, v in fixed.items() for x in (f"--{k}", v)] + [str(x) for x in more]
        env = dict(os.environ)
        if given.device == "cuda":
            visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
            env["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
        self._name = f"{role} {shape}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=MODELS.parents[1]
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(LAST):
                self._lines.put(line[len(LAST) :])
        self._lines.put(None)

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def says(self, what: str, deadline_s: float) -> dict[str, Any]:
        """Its next answer. `what` is waited for, as it is said on stderr."""
        print(f"{self._name}: {what}, at most {deadline_s:.0f} s", file=sys.stderr, flush=True)
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise SystemExit(f"{self._name}: {what}: not within {deadline_s:.0f} s") from None
        if line is None:
            raise SystemExit(f"{self._name}: ended with {self._process.wait(30)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def link_seconds(size: int, shape: str, given: argparse.Namespace) -> float:
    """Median of plain broadcasts of `size` bytes."""
    first = Child("link", shape, given, 0, "--rank", 0, "--bytes", size)
    try:
        port = first.says("starting", START_S)["port"]
        second = Child("link", shape, given, 1, "--rank", 1, "--bytes", size, "--port", port)
        try:
            most_s = patience_s(size, given.updates + 2)
            ends = [end.says("plain broadcasts", most_s)["seconds"] for end in (first, second)]
        finally:
            second.end()
    finally:
        first.end()
    return statistics.median(max(pair) for pair in zip(*ends, strict=True))


def updates(engine_name: str, shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of one engine and shape: medians over the updates after the first, which makes the group and the buffers."""
    sender = Child("trainer", shape, given, 0)
    try:
        told = sender.says("making the weights", patience_s(weight_bytes(shape, given.dtype)))
        size = told["bytes"]
        plain_s = link_seconds(size, shape, given)
        taker = Child("engine", shape, given, 1, "--engine", engine_name)
        try:
            taker.says(f"starting {engine_name}", COMPILE_S + patience_s(size))
            taker.tell(do="join", offer=told["offer"])
            sender.tell(do="members")
            if not sender.says("the engine connects", 2 * START_S)["members"]:
                raise SystemExit(f"the engine does not connect within {START_S:.0f} s")
            rows = [_update(sender, taker, f"update {i} of {given.updates}", size) for i in range(given.updates + 1)]
        finally:
            taker.end()
    finally:
        sender.end()
    figures = {k: statistics.median(r[k] for r in rows[1:]) for k in rows[0]}
    goal = goal_s(size, size / plain_s)
    return {**figures, "first_update_s": rows[0]["update_s"], "bytes": size, "bandwidth": size / plain_s, "goal_s": goal,
            "met": figures["update_s"] <= goal}  # fmt: skip


def _update(sender: Child, taker: Child, what: str, size: int) -> dict[str, float]:
    most_s = 2 * patience_s(size)  # the children give up before
    sender.tell(do="transfer")
    sent = sender.says(f"{what}: sending", most_s)
    taker.tell(do="swap", ref={k: sent[k] for k in ("lineage", "version", "digest")})
    taken = taker.says(f"{what}: swapping in", most_s)
    return {
        "update_s": sent["prepare_s"] + sent["transfer_s"] + taken["pause_s"],
        "prepare_s": sent["prepare_s"],
        "transfer_s": sent["transfer_s"],
        "receive_s": taken["receive_s"],
        "pause_s": taken["pause_s"],
        "decoded": float(taken["decoded"]),
    }


def told(engine_name: str, shape: str, found: dict[str, Any]) -> str:
    """A line for people."""
    return (
        f"{engine_name:5} {shape:12} {found['bytes'] / 1e9:7.3f} GB  link {found['bandwidth'] / 1e9:6.1f} GB/s  "
        f"transfer {found['transfer_s'] * 1e3:8.1f} ms  pause {found['pause_s'] * 1e3:7.1f} ms  "
        f"update {found['update_s'] * 1e3:8.1f} ms  (first {found['first_update_s'] * 1e3:.0f} ms)\n"
        f"      goal 1.5 x bytes/bandwidth + 50 ms = {found['goal_s'] * 1e3:.1f} ms: {'met' if found['met'] else 'MISSED'}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, of parent and children."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_weights", description=__doc__)
    parser.add_argument("--engine", choices=("torch", "vllm", "both"), default="both")
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "7b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--bucket", type=float, default=256 * 2**20, help="bytes sent at a time")
    parser.add_argument("--updates", type=int, default=5, help="after the first one")
    parser.add_argument("--sequences", type=int, default=32, help="generated meanwhile")
    parser.add_argument("--tokens", type=int, default=512, help="of each")
    parser.add_argument("--share", type=float, default=0.85, help="vllm: of the card")
    parser.add_argument("--json", type=Path, help="write all figures there")
    for name in ("role", "shape"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rank", "bytes", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    given.dtype = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every goal was met, 1 when one was missed."""
    given = parse(argv)
    if given.role:
        {"link": link, "trainer": trainer, "engine": engine}[given.role](given)
        return 0
    figures: dict[str, Any] = {}
    for shape in given.shapes:
        for name in ("torch", "vllm") if given.engine == "both" else (given.engine,):
            found = figures[f"{name}_{shape}"] = updates(name, shape, given)
            print(told(name, shape, found), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    return 0 if all(f["met"] for f in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
