"""Both ends of the direct path while the other goes on: a swap that the next transfer would overtake, connections that fail, an end."""

import resource
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.rl.engine.vllm_host.in_place import InPlace
from runtime.rl.engine.vllm_host.wire import Closed, Line
from runtime.rl.engine.vllm_host.worker import GenerationReader
from runtime.rl.types import ChannelMember, ChannelOffer
from runtime.rl.weights.receiver import WeightsReceiver
from runtime.rl.weights.sender import WeightsSender
from tests.rl.test_weights_direct import Source, wait_until

SIZE = 1000
LATE_S = 0.5  # for what must not happen to happen


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    made = WeightsSender(
        host="127.0.0.1", trainer_epoch=1, device=torch.device("cpu"), bucket_bytes=100_000, deadline_s=120.0
    )
    yield made
    made.close()


class Model(nn.Module):
    """Has the source's tensors, loaded as vLLM's models load."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in Source(0, size=SIZE).full_weights():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            names.add(name)
        return names

    def holds(self, version: int) -> bool:
        return all(torch.equal(self.get_parameter(n), t) for n, t in Source(version, size=SIZE).full_weights())


@pytest.fixture
def worker(sender: WeightsSender) -> Iterator[GenerationReader]:
    """As vLLM's worker is, on a model that needs no processing."""
    made = GenerationReader()
    made.model_runner, made.vllm_config = SimpleNamespace(model=Model()), SimpleNamespace()
    made._hexctl_in_place = InPlace()
    made._hexctl_in_place.way = "load"
    offer = {k: getattr(sender.offer, k) for k in sender.offer.__dataclass_fields__}
    made.hexctl_join(offer, {"replica": "a", "epoch": 1})
    wait_until(lambda: len(sender.members) == 1, "it connects")
    yield made
    assert made._hexctl_receiver is not None
    made._hexctl_receiver.stop()


def sent(sender: WeightsSender, worker: GenerationReader, version: int) -> dict[str, Any]:
    """Transfer a version; what the engine is told of it."""
    done = sender.transfer(Source(version, size=SIZE))
    assert done is not None
    ref = {"lineage": 0, "version": version, "path": "", "digest": done.digest}
    wait_until(lambda: arrived(worker) == version, "the last word has come")
    return ref


def arrived(worker: GenerationReader) -> int | None:
    assert worker._hexctl_receiver is not None
    got = worker._hexctl_receiver.received
    return None if got is None else got.version


def test_the_next_generation_waits_for_a_swap_that_has_begun(sender: WeightsSender, worker: GenerationReader) -> None:
    """Between an engine's question and its swap lie the steps under way: a trainer that is ready meanwhile must not take the
    buffer away, or the engine stands without weights."""
    ref = sent(sender, worker, 1)
    assert worker.hexctl_claim(ref) == ""
    nxt = threading.Thread(target=lambda: sender.transfer(Source(2, size=SIZE)))
    nxt.start()
    nxt.join(LATE_S)
    shapes = [(s.name, s.shape) for s in Source(1, size=SIZE).weight_specs()]
    assert worker.hexctl_swap(ref, shapes)[0] == ""
    assert worker.model_runner.model.holds(1)
    nxt.join(60.0)
    wait_until(lambda: arrived(worker) == 2, "the next one came")


def test_a_claim_that_is_let_go_holds_up_nobody(sender: WeightsSender, worker: GenerationReader) -> None:
    ref = sent(sender, worker, 1)
    assert worker.hexctl_claim(ref) == ""
    assert worker.hexctl_let_go() == ""
    nxt = sent(sender, worker, 2)
    assert worker.hexctl_claim(ref) != ""  # and what is not here cannot be claimed
    again = sent(sender, worker, 3)
    assert (worker.hexctl_claim(nxt) != "", worker.hexctl_claim(again)) == (True, "")


def test_a_process_out_of_descriptors_takes_engines_again_later(sender: WeightsSender) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            first.connect((sender.offer.host, sender.offer.port))
            threading.Event().wait(LATE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        first.settimeout(60.0)
        first.sendall(b"\0\0\0\x02{}")  # no hello
        assert first.recv(1) in (b"", b"\0")  # it was heard
    reader = GenerationReader()
    reader.model_runner = SimpleNamespace(model=Model())
    reader.hexctl_join(
        {k: getattr(sender.offer, k) for k in sender.offer.__dataclass_fields__}, {"replica": "a", "epoch": 1}
    )
    assert reader._hexctl_receiver is not None
    try:
        wait_until(lambda: len(sender.members) == 1, "an engine that came later is connected")
    finally:
        reader._hexctl_receiver.stop()


def test_an_engine_comes_again_to_a_trainer_that_was_too_busy_to_answer() -> None:
    member = ChannelMember(replica="a", epoch=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        offer = ChannelOffer(host="127.0.0.1", port=server.getsockname()[1], token="t", trainer_epoch=1)
        receiver = WeightsReceiver(offer, member, device=torch.device("cpu"), hello_s=0.3)
        try:
            for _ in range(2):
                end, _address = server.accept()
                with end:
                    line = Line(end)
                    hello = line.receive(60.0)
                    assert hello is not None
                    assert (hello["kind"], hello["replica"]) == ("hello", "a")
                    with pytest.raises(Closed):
                        line.receive(60.0)  # it goes away by itself
        finally:
            receiver.stop()


def test_a_closed_channel_takes_nobody(sender: WeightsSender) -> None:
    sender.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((sender.offer.host, sender.offer.port), timeout=60)
