"""Weights straight from the trainer to engine processes over gloo: whole, equal, within deadlines, whoever dies."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.errors import RunError, WeightsError
from runtime.rl.types import ChannelMember, WeightsRef
from runtime.rl.weights.layout import (
    ALIGN,
    Layout,
    TensorSpec,
    checksum,
    decode_layout,
    filled,
    fingerprint_of,
    lay_out,
    pieces,
    spec_of,
)
from runtime.rl.weights.receiver import WeightsReceiver
from runtime.rl.weights.sender import WeightsSender

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
UP_S = 120.0


def random_tensors(seed: int, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (1,), (7,), (3, 5), (64, 33), (129,), (0,)]
    made = {}
    for i in range(count):
        shape = shapes[int(torch.randint(len(shapes), (), generator=generator))]
        made[f"t{i}"] = torch.randn(shape, generator=generator).to(DTYPES[i % len(DTYPES)])
    return made


@given(seed=st.integers(0, 10_000), count=st.integers(1, 12), bucket=st.integers(1, 5000), buffers=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_packed_buckets_hold_the_tensors_bit_by_bit(seed: int, count: int, bucket: int, buffers: int) -> None:
    tensors = random_tensors(seed, count)
    layout = lay_out((spec_of(n, t) for n, t in tensors.items()), bucket)
    assert decode_layout(json.loads(json.dumps(layout.encode()))) == layout
    flat = torch.full((layout.total,), 255, dtype=torch.uint8)
    space = [torch.full((layout.bucket_bytes,), 255, dtype=torch.uint8) for _ in range(buffers)]
    edges = layout.buckets if layout.total else ()
    seen = 0
    for number, data in filled(layout, tensors.items(), space):
        low, high = edges[number]
        flat[low:high] = data
        seen += 1
    assert seen == len(edges)
    for name, view in layout.views(flat):
        assert view.dtype == tensors[name].dtype
        assert view.shape == tensors[name].shape
        assert torch.equal(view, tensors[name])
    whole = torch.cat([data for _, data in pieces(layout, tensors.items())]) if layout.total else flat
    assert torch.equal(whole, flat), "the gaps are zeros, so that equal tensors have equal checksums"


@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_checksum_tells_a_changed_bit_and_words_that_changed_places(seed: int, data: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = ALIGN * data.draw(st.integers(1, 20))
    one = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    other = one.clone()
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    other[at] ^= 1 << bit
    assert checksum(one).tolist() != checksum(other).tolist()
    words = one.clone().view(torch.int64)
    a, b = data.draw(st.integers(0, size // 8 - 1)), data.draw(st.integers(0, size // 8 - 1))
    words[a], words[b] = words[b].clone(), words[a].clone()
    same = torch.equal(words.view(torch.uint8), one)
    assert (checksum(words.view(torch.uint8)).tolist() == checksum(one).tolist()) == same


def test_a_checksum_is_the_sum_it_says_it_is() -> None:
    """By hand: one row of 32 words, weights i * odd, made odd; modulo 2^64."""
    words = torch.arange(32, dtype=torch.int64)
    odd, modulus = 0x9E3779B97F4A7C15, 2**64
    weights = [(i * odd % modulus) | 1 for i in range(1, 33)]
    expected = sum(w * i for i, w in enumerate(weights)) % modulus, sum(range(32)) * weights[0] % modulus
    assert tuple(s % modulus for s in checksum(words.view(torch.uint8)).tolist()) == expected


def test_other_tensors_than_those_laid_out_are_refused() -> None:
    tensors = random_tensors(0, 3)
    layout = lay_out((spec_of(n, t) for n, t in tensors.items()), 1024)
    for wrong in (
        list(tensors.items())[:2],
        [*tensors.items(), ("extra", torch.zeros(1))],
        list(reversed(tensors.items())),
    ):
        with pytest.raises(WeightsError):
            list(pieces(layout, wrong))


class Source:
    """A trainer's weights: version v has the values of seed v."""

    lineage = 0

    def __init__(
        self, version: int = 1, *, size: int = 200_000, on_tensor: Callable[[int], None] = lambda _: None
    ) -> None:
        self.version, self._size, self._on_tensor = version, size, on_tensor

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.version)
        for i in range(4):
            yield f"w{i}", torch.randn(self._size, generator=generator).bfloat16()
        yield "bias", torch.randn(3, generator=generator)

    def weight_specs(self) -> list[TensorSpec]:
        return [spec_of(n, t) for n, t in self._tensors()]

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for i, pair in enumerate(self._tensors()):
            self._on_tensor(i)
            yield pair


class Peer:
    """A receiver process and what it says."""

    def __init__(self, sender: WeightsSender, name: str) -> None:
        offer = {k: getattr(sender.offer, k) for k in sender.offer.__dataclass_fields__}
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("weights_peer.py")), json.dumps(offer), name],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.says() == "up"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def says(self, within_s: float = UP_S) -> str:
        return self._lines.get(timeout=within_s)

    def silent(self) -> bool:
        return self._lines.empty()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


def wait_until(done: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def there(sender: WeightsSender) -> list[str]:
    """Replicas that a transfer would go to. One that was slow to give a failed one up was disconnected, and comes again."""
    return [p.member.replica for p in sender._present()]


@pytest.fixture
def world() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*names: str, deadline_s: float = 120.0, bucket_bytes: int = 100_000) -> tuple[WeightsSender, list[Peer]]:
        sender = WeightsSender(
            host="127.0.0.1",
            trainer_epoch=1,
            device=torch.device("cpu"),
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
        )
        made.append(sender.close)
        peers = []
        for name in names:
            peers.append(Peer(sender, name))
            made.append(peers[-1].end)
        wait_until(lambda: len(sender.members) == len(names), "all connected")
        return sender, peers

    yield make
    for end in reversed(made):
        end()


def expected_digest(source: Source, bucket_bytes: int = 100_000) -> str:
    layout = lay_out(source.weight_specs(), bucket_bytes)
    flat = torch.cat([d for _, d in pieces(layout, source.full_weights())])
    return fingerprint_of(layout, flat, lineage=0, version=source.version)


def test_every_member_has_the_very_bytes_update_after_update_and_joiners_rebuild_the_group(
    world: Callable[..., Any],
) -> None:
    sender, (one, two) = world("a", "b")
    for version in (1, 2, 3):
        done = sender.transfer(Source(version))
        assert done is not None
        assert (done.members, done.version, done.rebuilt) == (2, version, version == 1)
        assert done.digest == expected_digest(Source(version))
        for peer in (one, two):
            assert json.loads(peer.says()) == {"version": version, "digest": done.digest, "names": 5}
    joiner = Peer(sender, "c")
    try:
        wait_until(lambda: len(sender.members) == 3, "the joiner is there")
        done = sender.transfer(Source(4))
        assert done is not None
        assert done.members == 3
        assert done.rebuilt
        assert {json.loads(p.says())["digest"] for p in (one, two, joiner)} == {done.digest}
    finally:
        joiner.end()
    two.end()
    done = sender.transfer(Source(5))  # leavers are noticed before anything is sent
    assert done is not None
    assert done.members == 1
    assert done.rebuilt
    assert json.loads(one.says())["version"] == 5


class OverHost(WeightsReceiver):
    """As on a device without room for a second buffer: bucket by bucket through two small ones."""

    def _buffers(self, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        small = [torch.empty(min(layout.bucket_bytes, layout.total), dtype=torch.uint8) for _ in range(2)]
        return torch.empty(layout.total, dtype=torch.uint8), small


@pytest.mark.parametrize("kind", [WeightsReceiver, OverHost])
def test_the_second_buffer_may_be_elsewhere_than_where_buckets_arrive(
    world: Callable[..., Any], kind: type[WeightsReceiver]
) -> None:
    sender, _ = world()
    receiver = kind(sender.offer, ChannelMember(replica="a", epoch=1), device=torch.device("cpu"))
    try:
        wait_until(lambda: len(sender.members) == 1, "it connects")
        for version in (1, 2):
            done = sender.transfer(Source(version))
            assert done is not None
            ref = WeightsRef(lineage=0, version=version, path="", digest=done.digest)
            wait_until(lambda ref=ref: receiver.holds(ref), "the last word has come")
            with receiver.taken(ref) as got:
                assert got is not None
                assert all(torch.equal(got.tensors[n], t) for n, t in Source(version).full_weights())
            with receiver.taken(ref) as got:
                assert got is None, "a taken generation is given up"
    finally:
        receiver.stop()


def test_a_source_is_closed_when_its_transfer_fails(world: Callable[..., Any]) -> None:
    """A sharded source has other ranks that gather along: it must hear that nobody asks for the rest."""
    sender, (one,) = world("a")
    closed = threading.Event()

    class Sharded(Source):
        def full_weights(self) -> Iterator[tuple[str, Tensor]]:
            try:
                yield from super().full_weights()
            finally:
                closed.set()

    def kill(i: int) -> None:
        if i == 1:
            one.end()

    with pytest.raises(RunError):
        sender.transfer(Sharded(1, on_tensor=kill))
    assert closed.wait(60)


def test_nobody_there_is_no_error(world: Callable[..., Any]) -> None:
    sender, _ = world()
    assert sender.transfer(Source()) is None


def test_a_member_killed_within_a_transfer_ends_it_at_once_and_the_rest_go_on(world: Callable[..., Any]) -> None:
    sender, (one, two) = world("a", "b")
    assert sender.transfer(Source(1)) is not None
    one.says(), two.says()

    def kill(i: int) -> None:
        if i == 2:
            two.end()

    began = time.monotonic()
    with pytest.raises(RunError):
        sender.transfer(Source(2, on_tensor=kill))
    assert time.monotonic() - began < 60.0, "a death is noticed, not waited for"
    assert one.silent(), "half a generation is none"
    wait_until(lambda: there(sender) == ["a"], "the other is there")
    done = sender.transfer(Source(2))
    assert done is not None
    assert done.members == 1
    assert json.loads(one.says()) == {"version": 2, "digest": done.digest, "names": 5}


def test_a_member_that_hangs_ends_the_transfer_at_the_deadline_and_comes_back(world: Callable[..., Any]) -> None:
    sender, (one, two) = world("a", "b")
    assert sender.transfer(Source(1)) is not None
    one.says(), two.says()

    def hang(i: int) -> None:
        if i == 2:
            two.process.send_signal(signal.SIGSTOP)

    began, deadline_s, sender._deadline_s = time.monotonic(), sender._deadline_s, 2.0
    with pytest.raises(RunError):
        sender.transfer(Source(2, size=4_000_000, on_tensor=hang))
    assert time.monotonic() - began < 60.0
    assert one.silent()
    sender._deadline_s = deadline_s
    wait_until(lambda: there(sender) == ["a"], "the other is there")
    done = sender.transfer(Source(2))
    assert done is not None
    assert done.members == 1, "who hangs is left out"
    assert json.loads(one.says())["version"] == 2
    two.process.send_signal(signal.SIGCONT)
    wait_until(lambda: there(sender) == ["a", "b"], "it connects again")
    done = sender.transfer(Source(3))
    assert done is not None
    assert done.members == 2
    assert {json.loads(p.says())["version"] for p in (one, two)} == {3}


def test_a_source_that_fails_leaves_nothing_behind(world: Callable[..., Any]) -> None:
    sender, (one,) = world("a")

    def fail(i: int) -> None:
        if i == 3:
            raise ValueError("no more tensors")

    with pytest.raises(RunError, match="failed"):
        sender.transfer(Source(1, on_tensor=fail))
    assert one.silent()
    wait_until(lambda: there(sender) == ["a"], "it is there, or again")
    assert sender.transfer(Source(1)) is not None
    assert json.loads(one.says())["version"] == 1


def test_a_stranger_without_the_token_is_turned_away(world: Callable[..., Any]) -> None:
    import socket

    from runtime.rl.engine.vllm_host.wire import Line

    sender, _ = world()
    with socket.create_connection((sender.offer.host, sender.offer.port), timeout=60) as end:
        line = Line(end)
        line.send(
            {
                "kind": "hello",
                "token": "guess",
                "replica": "x",
                "epoch": 1,
                "rank": 0,
                "device_kind": "",
                "device": "cpu",
            }
        )
        answer = line.receive(60.0)
    assert answer is not None
    assert answer["kind"] == "refused"
    assert sender.members == ()
