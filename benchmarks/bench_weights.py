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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
SHAPES = {"1.5b": "r1-distill-qwen-1.5b", "7b": "qwen2.5-7b"}
LAST = "figures "  # begins each line of a child that holds figures
REPLY_S = 900.0  # an engine of 7B compiles for minutes
GOAL_RATIO, GOAL_S = 1.5, 0.05


def model_config(shape: str) -> dict[str, Any]:
    """config.json of a shape: of ours, or of a folder or file."""
    name = SHAPES.get(shape, shape)
    path = MODELS / name / "config.json" if (MODELS / name).is_dir() else MODELS / f"{name}.json"
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def goal_s(size: int, bytes_per_s: float) -> float:
    """Most seconds that an update should take."""
    return GOAL_RATIO * size / bytes_per_s + GOAL_S


def say(**figures: Any) -> None:
    """One answer to the parent."""
    print(LAST + json.dumps(figures), flush=True)


def commands() -> "queue.Queue[dict[str, Any]]":
    """What the parent says, as it comes."""
    arrived: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            arrived.put(json.loads(line))
        arrived.put({"do": "end"})

    threading.Thread(target=read, daemon=True).start()
    return arrived


# Children


def link(given: argparse.Namespace) -> None:
    """One end of the plain broadcasts."""
    import torch

    from runtime.rl.weights.group import Group, reach_store, serve_store

    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    if given.rank == 0:
        store, port = serve_store("127.0.0.1", 120.0)
        say(port=port)
    else:
        store = reach_store("127.0.0.1", given.port, 120.0)
    group = Group(store, name="link", rank=given.rank, world=2, host="127.0.0.1", device=device, timeout_s=120.0)
    data = torch.zeros(given.bytes, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(given.updates + 2):
        group.finish(group.broadcast(data[:8]), time.monotonic() + 120)  # both are there
        _settle(device)
        began = time.perf_counter()
        group.finish(group.broadcast(data), time.monotonic() + 120)
        _settle(device)
        taken.append(time.perf_counter() - began)
    group.abort()
    say(seconds=taken[2:])


def _settle(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def trainer(given: argparse.Namespace) -> None:
    """Dummy weights and a sender; every update has other values."""
    import torch

    from runtime.rl.engine.vllm_host.model_folder import expected_shapes
    from runtime.rl.weights.layout import TensorSpec, lay_out
    from runtime.rl.weights.sender import WeightsSender

    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    dtype = getattr(torch, given.dtype)

    class Dummy:
        lineage, version = 0, 0

        def __init__(self) -> None:
            generator = torch.Generator(device=device).manual_seed(0)
            self.tensors = {
                n: torch.randn(s, generator=generator, device=device, dtype=torch.float32).mul_(0.02).to(dtype)
                for n, s in expected_shapes(model_config(given.shape))
            }

        def weight_specs(self) -> list[TensorSpec]:
            return [TensorSpec(name=n, shape=tuple(t.shape), dtype=given.dtype) for n, t in self.tensors.items()]

        def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.tensors.items()

        def step(self) -> None:
            self.version += 1
            for tensor in self.tensors.values():
                tensor.mul_(0.999)

    source = Dummy()
    sender = WeightsSender(
        host="127.0.0.1", trainer_epoch=1, device=device, bucket_bytes=int(given.bucket), deadline_s=120.0
    )
    total = lay_out(source.weight_specs(), int(given.bucket)).total
    say(offer={k: getattr(sender.offer, k) for k in sender.offer.__dataclass_fields__}, bytes=total)
    arrived = commands()
    while (command := arrived.get())["do"] != "end":
        if command["do"] == "members":
            say(members=len(sender.members))
            continue
        source.step()
        _settle(device)
        sent = sender.transfer(source)
        assert sent is not None
        say(**{k: getattr(sent, k) for k in sent.__dataclass_fields__})
    sender.close()


def engine(given: argparse.Namespace) -> None:
    """Generates without end; joins and swaps when told to."""
    from runtime.rl.protocols import TakesDirect
    from runtime.rl.types import ChannelMember, ChannelOffer, Lease, SampleId, WeightsRef

    made = _engine(given)
    assert isinstance(made, TakesDirect)
    arrived = commands()
    say(up=True)
    group = 0
    while True:
        try:
            command = arrived.get_nowait()
        except queue.Empty:
            if made.version is None:
                command = arrived.get()
            else:
                while len(made.held()) < given.sequences:
                    group += 1
                    made.add(
                        [
                            Lease(
                                sample=SampleId(group, 0), epoch=1, prompt_tokens=(3, 4, 5), max_new_tokens=given.tokens
                            )
                        ]
                    )
                made.step()
                continue
        match command["do"]:
            case "join":
                made.join(ChannelOffer(**command["offer"]), ChannelMember(replica="bench", epoch=1))
            case "swap":
                ref = WeightsRef(path="", **command["ref"])
                began = time.monotonic()
                while not made.swap_weights(ref):
                    if time.monotonic() - began > 60:
                        raise SystemExit("the update did not come")
                stats = made.stats()
                say(pause_s=stats.update_pause_s, receive_s=stats.update_receive_s, decoded=stats.decoded_tokens)
            case _:
                break
    made.close()


def _engine(given: argparse.Namespace) -> Any:
    from runtime.rl.engine.spec import EngineSpec, VllmSpec

    model = model_config(given.shape)
    longest = given.tokens + 8
    if given.engine == "torch":
        from runtime.rl.engine.torch_engine import TorchEngine
        from runtime.rl.model import DecoderConfig
        from runtime.rl.weights import read_generation

        spec = EngineSpec(
            slots=given.sequences,
            max_length=longest,
            kv_tokens=given.sequences * longest,
            eos_ids=frozenset(),
            seed=1,
            dtype=given.dtype,
            device="cuda:0" if given.device == "cuda" else "cpu",
        )
        return TorchEngine(DecoderConfig.from_hf(model), spec, read_generation)
    from runtime.rl.engine.vllm_engine import VllmEngine

    return VllmEngine(
        VllmSpec(
            model=model,
            slots=given.sequences,
            max_length=longest,
            eos_ids=frozenset(),
            seed=1,
            dtype=given.dtype,
            device=given.device,
            gpu_memory_share=given.share,
            eager=given.device == "cpu",
            second_buffer=True,
        )
    )


# The parent


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

    def says(self) -> dict[str, Any]:
        line = self._lines.get(timeout=REPLY_S)
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
        port = first.says()["port"]
        second = Child("link", shape, given, 1, "--rank", 1, "--bytes", size, "--port", port)
        try:
            ends = (first.says()["seconds"], second.says()["seconds"])
        finally:
            second.end()
    finally:
        first.end()
    return statistics.median(max(pair) for pair in zip(*ends, strict=True))


def updates(engine_name: str, shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of one engine and shape: medians over the updates after the first, which makes the group and the buffers."""
    sender = Child("trainer", shape, given, 0)
    try:
        told = sender.says()
        size = told["bytes"]
        plain_s = link_seconds(size, shape, given)
        taker = Child("engine", shape, given, 1, "--engine", engine_name)
        try:
            taker.says()
            taker.tell(do="join", offer=told["offer"])
            until = time.monotonic() + 60
            while True:
                sender.tell(do="members")
                if sender.says()["members"]:
                    break
                if time.monotonic() > until:
                    raise SystemExit("the engine does not connect")
            rows = [_update(sender, taker) for _ in range(given.updates + 1)]
        finally:
            taker.end()
    finally:
        sender.end()
    figures = {k: statistics.median(r[k] for r in rows[1:]) for k in rows[0]}
    goal = goal_s(size, size / plain_s)
    return {**figures, "first_update_s": rows[0]["update_s"], "bytes": size, "bandwidth": size / plain_s, "goal_s": goal,
            "met": figures["update_s"] <= goal}  # fmt: skip


def _update(sender: Child, taker: Child) -> dict[str, float]:
    sender.tell(do="transfer")
    sent = sender.says()
    taker.tell(do="swap", ref={k: sent[k] for k in ("lineage", "version", "digest")})
    taken = taker.says()
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
