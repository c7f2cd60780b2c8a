"""The loops of replica and trainer with direct weights: what is swapped, what is loaded, what is told to flow and when."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.errors import RunError, WeightsError
from runtime.rl.engine.torch_engine import TorchEngine
from runtime.rl.types import ChannelMember, ChannelOffer, ExchangeReply, ExchangeRequest, WeightsRef
from runtime.rl.weights import GenerationWriter, list_generations, read_generation
from runtime.rl.weights.publisher import DirectPublisher
from runtime.rl.weights.sender import WeightsSender, WeightsSource
from tests.rl.rollout_world import ToyEngine, World
from tests.rl.test_trainer_loop import Flow, a_loop, a_trainer

OFFER = ChannelOffer(host="127.0.0.1", port=1, token="t", trainer_epoch=1)


def ref(version: int, lineage: int = 0, digest: str = "") -> WeightsRef:
    return WeightsRef(lineage=lineage, version=version, path=f"v{version}", digest=digest or f"d{version}")


class DirectEngine(ToyEngine):
    """A toy that may have generations in a second buffer."""

    here: WeightsRef | None = None
    swaps = 0
    joined: tuple[ChannelOffer, ...] = ()

    def join(self, offer: ChannelOffer, member: ChannelMember) -> None:
        assert (member.replica, member.epoch) == ("r0", 1)
        self.joined = (*self.joined, offer)

    def swap_weights(self, wanted: WeightsRef) -> bool:
        if self.here != wanted:
            return False
        self.here, self.swaps = None, self.swaps + 1
        self.version, self.digest = wanted.version, wanted.digest
        return True


class DirectWorld(World):
    """Flow says what is at the engines beside what is on disk."""

    def __init__(self) -> None:
        super().__init__(work=40)
        self.direct: WeightsRef | None = None
        self.channel: ChannelOffer | None = OFFER
        self.engine.__class__ = DirectEngine
        plain = self.desk.exchange

        def exchange(request: ExchangeRequest) -> ExchangeReply:
            from planner.record import replace

            return replace(plain(request), direct=self.direct, channel=self.channel)

        self.desk.exchange = exchange  # type: ignore[method-assign]

    @property
    def toy(self) -> DirectEngine:
        assert isinstance(self.engine, DirectEngine)
        return self.engine


def test_a_replica_swaps_what_is_here_and_waits_for_the_disk_with_what_it_has() -> None:
    world = DirectWorld()
    world.run(1.0)
    assert (world.toy.joined, world.toy.version, world.toy.loads) == ((OFFER,), 0, 1)
    world.direct = ref(1)  # it went to the others
    world.run(2.0)
    assert (world.toy.version, world.toy.loads) == (0, 1), "what is neither here nor on disk is not waited for"
    world.toy.here = ref(1)
    world.run(3.0)
    assert (world.toy.version, world.toy.swaps, world.toy.loads) == (1, 1, 1)
    world.desk.weights = ref(1)  # now on disk: nothing is loaded again
    world.direct = None
    world.run(4.0)
    assert (world.toy.loads, world.toy.swaps) == (1, 1)
    world.direct = ref(2)
    world.run(5.0)
    world.desk.weights, world.direct = ref(2), None  # the transfer went past it: by disk
    world.run(6.0)
    assert (world.toy.version, world.toy.loads) == (2, 2)


def test_a_replica_never_goes_back_within_a_lineage_but_with_a_fork() -> None:
    world = DirectWorld()
    world.direct = world.toy.here = ref(3)
    world.desk.weights = ref(1)
    world.run(1.0)
    assert (world.toy.version, world.toy.loads) == (3, 0)
    world.run(3.0)
    assert world.toy.version == 3, "the disk is behind, and stays so for a while"
    world.desk.weights, world.direct = ref(2, lineage=1), None
    world.run(4.0)
    assert world.toy.version == 2


def test_a_replica_whose_weights_failed_takes_older_ones_from_disk() -> None:
    world = DirectWorld()
    world.run(1.0)
    world.toy.broken.add(1)
    world.desk.weights = ref(1)
    world.run(1.5)
    assert world.toy.version is None
    world.desk.weights = ref(0)
    world.run(5.0)
    assert world.toy.version == 0


def test_a_new_trainer_has_a_new_channel() -> None:
    world = DirectWorld()
    world.run(1.0)
    world.channel = ChannelOffer(host="127.0.0.1", port=2, token="u", trainer_epoch=2)
    world.run(2.0)
    assert world.toy.joined == (OFFER, world.channel)


def test_engines_say_whether_they_take_weights_directly() -> None:
    from runtime.rl.engine.vllm_engine import VllmEngine
    from runtime.rl.protocols import TakesDirect

    for kind in (TorchEngine, VllmEngine):
        assert all(hasattr(kind, name) for name in ("join", "swap_weights"))
    assert not isinstance(ToyEngine, TakesDirect)


# The trainer's side


class Sender(WeightsSender):
    """A sender whose transfers take the fates of a list: True reaches an engine, False fails, None: nobody is there."""

    fates: list[bool | None]
    digests: list[str]

    def transfer(self, source: WeightsSource):  # type: ignore[no-untyped-def]
        from runtime.rl.weights.channel import Transfer
        from runtime.rl.weights.layout import fingerprint_of, lay_out, pieces

        fate = self.fates.pop(0) if self.fates else True
        if fate is None:
            return None
        if not fate:
            raise RunError("a member is gone")
        layout = lay_out(source.weight_specs(), 1000)
        flat = torch.cat([d for _, d in pieces(layout, source.full_weights())])
        digest = fingerprint_of(layout, flat, lineage=source.lineage, version=source.version)
        self.digests.append(digest)
        return Transfer(
            lineage=source.lineage, version=source.version, digest=digest, bytes=layout.total, members=2, rebuilt=False,
            prepare_s=0.0, transfer_s=0.25,
        )  # fmt: skip


class StoredFlow(Flow):
    """Notes what was at the engines alone when it was published."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit=limit)
        self.told: list[tuple[int, bool]] = []
        self.on_disk: dict[int, WeightsRef] = {}

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        self._enter("published")
        self.told.append((ref.version, stored))
        if stored:
            read_generation(ref)
            self.on_disk[ref.version] = ref
        assert all(r.digest == ref.digest for r in self.publications if r.version == ref.version), "one hash a version"
        self.publications.append(ref)


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[DirectPublisher]:
    sender = Sender(host="127.0.0.1", trainer_epoch=1, device=torch.device("cpu"), bucket_bytes=1000, deadline_s=5.0)
    sender.fates, sender.digests = [], []
    made = DirectPublisher(tmp_path / "weights", sender, bucket_bytes=1000)
    yield made
    made.close()


def fates(direct: DirectPublisher, *given: bool | None) -> None:
    assert isinstance(direct._sender, Sender)
    direct._sender.fates = list(given)


def test_the_engines_are_first_and_the_disk_follows(tmp_path: Path, direct: DirectPublisher) -> None:
    """The next batch comes when the disk has caught up: a slow one would get the newest alone."""
    flow = StoredFlow(limit=3)

    def caught_up(call: str) -> None:
        if call == "next_batch":
            with direct._changed:
                assert direct._changed.wait_for(lambda: direct._pending is None and not direct._writing, 60)

    flow.fault = caught_up
    fates(direct, None, True, False, True)  # version 0: nobody is there yet; 2: a transfer fails
    assert a_loop(tmp_path, flow, direct=direct, weights=tmp_path / "weights", eta=4).run() == "stopped by flow"
    assert flow.hellos[0].channel == direct.offer
    assert [t for t in flow.told if t[0] in (0, 2)] == [(0, True), (2, True)], "by disk alone, before anybody is told"
    assert flow.told.index((1, False)) < flow.told.index((1, True))
    assert flow.told[-1] == (3, True), "the last one is waited for"
    assert set(flow.on_disk) == {0, 1, 2, 3}
    assert [flow.metrics[s]["direct_members"] for s in range(3)] == [0.0, 2.0, 0.0]
    assert flow.metrics[1]["transfer_s"] == 0.25
    assert flow.metrics[1]["transfer_bytes"] > 0


def test_the_disk_holds_what_was_sent_and_its_manifest_says_so(tmp_path: Path, direct: DirectPublisher) -> None:
    trainer = a_trainer(tmp_path)
    made = direct.publish(trainer)
    assert not made.stored
    direct.keep(trainer, made)
    sent = {n: t.clone() for n, t in trainer.full_weights()}
    with torch.no_grad():
        for master in trainer._masters.values():
            master.add_(1.0)  # training goes on while it is written
    assert direct.finish() == (made.ref,)
    read = read_generation(made.ref)
    assert all(torch.equal(read[n], t) for n, t in sent.items())
    (listed,) = list_generations(tmp_path / "weights")
    assert (listed.lineage, listed.version) == (0, 0)
    read_generation(listed)  # by its own digest too: export looks at the disk alone


def test_a_copy_that_is_not_what_was_sent_is_never_sealed(tmp_path: Path, direct: DirectPublisher) -> None:
    trainer = a_trainer(tmp_path)
    made = direct.publish(trainer)
    with torch.no_grad():
        next(iter(trainer._masters.values())).add_(1.0)  # changed between the transfer and the copy
    direct.keep(trainer, made)
    with pytest.raises(WeightsError, match="not what was sent"):
        direct.finish()
    assert list_generations(tmp_path / "weights") == ()


class Disk:
    """A disk that is slow until it is let go on, or full."""

    def __init__(self, root: Path, *, full: bool = False) -> None:
        self._writer, self._full, self.go_on = GenerationWriter(root), full, threading.Event()

    def write(self, tensors: Mapping[str, Tensor], **which: Any) -> WeightsRef:
        if self._full:
            raise OSError(28, "no space left")
        assert self.go_on.wait(60)
        return self._writer.write(tensors, **which)


def test_a_slow_disk_gets_the_newest_alone(tmp_path: Path, direct: DirectPublisher) -> None:
    disk = Disk(tmp_path / "weights")
    slow = DirectPublisher(tmp_path / "weights", direct._sender, bucket_bytes=1000, store=disk)
    trainer = a_trainer(tmp_path)
    for version in range(4):
        trainer._version = version
        made = slow.publish(trainer)
        slow.keep(trainer, made)
    disk.go_on.set()
    written = [r.version for r in slow.finish()]
    slow.close()
    assert written[-1] == 3
    assert len(written) <= 2, "one that was being written when the others came, and the last"


def test_the_disk_is_left_to_others_for_as_long_as_a_generation_took(tmp_path: Path, direct: DirectPublisher) -> None:
    disk, now_s, begun = GenerationWriter(tmp_path / "weights"), [0.0], []

    class AnHour(Disk):
        def write(self, tensors: Mapping[str, Tensor], **which: Any) -> WeightsRef:
            begun.append(which["version"])
            now_s[0] += 3600.0
            return disk.write(tensors, **which)

    publisher = DirectPublisher(
        tmp_path / "weights", direct._sender, bucket_bytes=1000, store=AnHour(tmp_path), clock=lambda: now_s[0]
    )
    trainer = a_trainer(tmp_path)
    publisher.keep(trainer, publisher.publish(trainer))
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: bool(publisher._stored), 60)
    for version in (1, 2, 3):
        trainer._version = version
        publisher.keep(trainer, publisher.publish(trainer))
    assert begun == [0]
    assert [r.version for r in publisher.finish()] == [0, 3], "whoever waits for the newest is not kept waiting"
    publisher.close()


def test_a_generation_that_did_not_come_to_disk_is_told_though_a_later_one_did(
    tmp_path: Path, direct: DirectPublisher
) -> None:
    begun = threading.Event()

    class FullOnce(Disk):
        def write(self, tensors: Mapping[str, Tensor], **which: Any) -> WeightsRef:
            self._full = not begun.is_set()
            begun.set()
            assert self.go_on.wait(60)
            return super().write(tensors, **which)

    disk = FullOnce(tmp_path / "weights")
    publisher = DirectPublisher(tmp_path / "weights", direct._sender, bucket_bytes=1000, store=disk)
    trainer = a_trainer(tmp_path)
    publisher.keep(trainer, publisher.publish(trainer))
    assert begun.wait(60)
    trainer._version = 1
    publisher.keep(trainer, publisher.publish(trainer))
    disk.go_on.set()
    with pytest.raises(OSError, match="no space left"):
        publisher.finish()
    publisher.close()
    assert [g.version for g in list_generations(tmp_path / "weights")] == [1]


def test_a_full_disk_ends_the_trainer_loudly(tmp_path: Path, direct: DirectPublisher) -> None:
    flow = StoredFlow(limit=3)
    disk = Disk(tmp_path / "weights", full=True)
    full = DirectPublisher(tmp_path / "weights", direct._sender, bucket_bytes=1000, store=disk)
    with pytest.raises(OSError, match="no space left"):
        a_loop(tmp_path, flow, direct=full).run()
    full.close()
