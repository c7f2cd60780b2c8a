"""What `benchmarks.bench_weights` starts: a trainer's process, an engine's, and the ends of the plain broadcasts. The parent speaks
to each in lines of JSON; how long anything may take is the same on both sides."""

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.model import load_model_spec

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
SHAPES = {"1.5b": "r1-distill-qwen-1.5b", "7b": "qwen2.5-7b"}
LAST = "figures "  # begins each line of a child that holds figures
# What a wait may take at most: a process starts, an engine compiles, and the weights are gone through, once or some times.
START_S, COMPILE_S, LEAST_BYTES_PER_S = 60.0, 240.0, 5e7


def model_path(shape: str) -> Path:
    """config.json of a shape: of ours, or of a folder or file."""
    name = SHAPES.get(shape, shape)
    return MODELS / name / "config.json" if (MODELS / name).is_dir() else MODELS / f"{name}.json"


def model_config(shape: str) -> dict[str, Any]:
    """What that file says."""
    config: dict[str, Any] = json.loads(model_path(shape).read_text())
    return config


def weight_bytes(shape: str, dtype: str) -> int:
    """Bytes of a shape's weights, before they are laid out for sending."""
    return load_model_spec(model_path(shape)).params * (4 if dtype == "float32" else 2)


def patience_s(size: int, times: int = 1) -> float:
    """Most seconds for what goes through `size` bytes so many times."""
    return START_S + times * size / LEAST_BYTES_PER_S


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


def link(given: argparse.Namespace) -> None:
    """One end of the plain broadcasts."""
    import torch

    from runtime.rl.weights.group import Group, reach_store, serve_store

    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    each_s = patience_s(given.bytes)
    if given.rank == 0:
        store, port = serve_store("127.0.0.1", each_s)
        say(port=port)
    else:
        store = reach_store("127.0.0.1", given.port, each_s)
    group = Group(store, name="link", rank=given.rank, world=2, host="127.0.0.1", device=device, timeout_s=each_s)
    data = torch.zeros(given.bytes, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(given.updates + 2):
        group.finish(group.broadcast(data[:8]), time.monotonic() + each_s)  # both are there
        _settle(device)
        began = time.perf_counter()
        group.finish(group.broadcast(data), time.monotonic() + each_s)
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
        host="127.0.0.1",
        trainer_epoch=1,
        device=device,
        bucket_bytes=int(given.bucket),
        deadline_s=patience_s(weight_bytes(given.shape, given.dtype)),
    )
    total = lay_out(source.weight_specs(), int(given.bucket)).total
    say(offer={k: getattr(sender.offer, k) for k in sender.offer.__dataclass_fields__}, bytes=total)
    arrived = commands()
    while (command := arrived.get())["do"] != "end":
        if command["do"] == "members":
            until = time.monotonic() + START_S
            while not sender.members and time.monotonic() < until:
                time.sleep(0.05)
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
    group, swap_s = 0, patience_s(weight_bytes(given.shape, given.dtype))
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
                    if time.monotonic() - began > swap_s:
                        raise SystemExit(f"the update did not come within {swap_s:.0f} s")
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
