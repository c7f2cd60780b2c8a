"""Which devices a run gets, and that no two runs get the same one."""

import subprocess
from pathlib import Path

import pytest

from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.record import replace
from runtime.backends import fleet
from runtime.backends.fleet import discover
from runtime.backends.gpu_kinds import gpu_kind
from runtime.backends.ray.devices import memory_back
from runtime.backends.ray.locks import claim, owner
from runtime.backends.ray.world import World
from runtime.cards import card_of, cards_of, is_gpu, part_ids, parts_of
from runtime.config.schema import Config, DeviceSection, FleetSection, KindSection, ModelSection
from runtime.errors import FleetError
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import mark
from runtime.telemetry.reading import GpuReading, HostReading, Report

MODEL = ModelSection(source="seeded", path=Path("unused"))
H200 = GpuReading(
    id="GPU-a", index=0, name="NVIDIA H200", pci="0:06", memory_total_bytes=150754820096.0, pids=(), age_s=0.0
)


def report(*gpus: GpuReading) -> Report:
    return Report(seq=1, library="ok", message="", gpus=gpus, host=HostReading())


def test_the_cpu_is_two_devices() -> None:
    """One can train while the other generates; nothing about it is called paced."""
    found = discover(Config(model=MODEL, fleet=FleetSection(source="cpu")))
    assert found.label == "cpu"
    assert [d.kind for d in found.cluster.devices] == ["host-cpu", "host-cpu"]
    assert not any(k.paced for k in found.cluster.kinds.values())
    assert found.notes


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXCTL_NVML", "/nowhere/libnvidia-ml.so.1")


def auto(kind: str, *, kinds: bool = True, pacing: Path | None = None) -> Config:
    section = KindSection(peak_flops=1e9, hbm=1e9, memory=1e8, link=1e8)
    devices = (DeviceSection(kind=kind, count=2),)
    return Config(
        model=MODEL,
        fleet=FleetSection(source="auto", devices=devices, kinds={kind: section} if kinds else {}, pacing=pacing),
    )


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(("pacing", "label"), [(None, "cpu"), (Path("speeds.toml"), "paced")])
def test_without_a_gpu_the_declared_devices_are_the_hosts_cpu(pacing: Path | None, label: str) -> None:
    """A file with declared speeds makes them paced ones, as fleet.source = "paced" would."""
    found = discover(auto("small", pacing=pacing))
    assert found.label == label
    assert [d.id for d in found.cluster.devices] == [f"{label}-n0-0", f"{label}-n0-1"]
    assert {k.paced for k in found.cluster.kinds.values()} == {label == "paced"}
    assert "no free GPU" in found.notes[0]


@pytest.mark.usefixtures("no_driver")
def test_the_cpu_does_not_pose_as_a_card() -> None:
    """Cards that are declared but not there: an error, no CPU under their name."""
    with pytest.raises(FleetError, match="does not have") as e:
        discover(auto("H100", kinds=False))
    assert "H100" in str(e.value.got)


def test_foreign_and_broken_cards_are_left_out_and_said() -> None:
    """A card with somebody's process, a card that hangs, and a free one."""
    cards = (
        replace(H200, id="GPU-a", pids=(4711,)),
        replace(H200, id="GPU-b", index=1, pci="0:07", note="driver not answering 9 s"),
        replace(H200, id="GPU-c", index=2, pci="0:08"),
    )
    free, notes = fleet.free_cards(report(*cards), visible_devices=None, owner_of=lambda _: None, own_run=None)
    assert [g.id for g in free] == ["GPU-c"]
    assert "foreign process 4711" in notes[0]
    assert "not answering" in notes[1]


def test_claimed_cards_are_the_claimants() -> None:
    """Another run's card is left out by that run's name; our own counts as free though our processes are on it."""
    cards = (replace(H200, id="GPU-a", pids=(1,)), replace(H200, id="GPU-b", pci="0:07", pids=(2,)))
    owners = {"GPU-a": "mine-1", "GPU-b": "other-2"}
    free, notes = fleet.free_cards(report(*cards), visible_devices=None, owner_of=owners.get, own_run="mine-1")
    assert [g.id for g in free] == ["GPU-a"]
    assert "belongs to run other-2" in notes[0]


def test_cuda_visible_devices_is_respected() -> None:
    """By position in PCI order, whatever NVML's indices are."""
    cards = (replace(H200, id="GPU-z", index=0, pci="0:09"), replace(H200, id="GPU-a", index=1, pci="0:01"))
    free, notes = fleet.free_cards(report(*cards), visible_devices="0", owner_of=lambda _: None, own_run=None)
    assert [g.id for g in free] == ["GPU-a"]
    assert notes == ("CUDA_VISIBLE_DEVICES shows 1 of 2 GPUs",)


@pytest.mark.parametrize(
    ("variable", "order", "other", "said"),
    [
        ("1", None, "NVIDIA L4", True),
        ("GPU-b, 0", "FASTEST_FIRST", "NVIDIA L4", True),
        ("1", "PCI_BUS_ID", "NVIDIA L4", False),
        ("1", None, "NVIDIA H200", False),
        ("GPU-b", None, "NVIDIA L4", False),
        (None, None, "NVIDIA L4", False),
    ],
)
def test_numbers_of_unlike_cards_are_not_what_cuda_takes_them_for(
    variable: str | None, order: str | None, other: str, said: bool
) -> None:
    """On a mixed node CUDA's first card is the fastest, which may be any on PCI."""
    cards = report(H200, replace(H200, id="GPU-b", index=1, name=other, pci="0:07"))
    _, notes = fleet.free_cards(
        cards, visible_devices=variable, device_order=order, owner_of=lambda _: None, own_run=None
    )
    assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in n for n in notes) == said


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
    ],
)
def test_cards_by_the_drivers_name(name: str, kind: str) -> None:
    got = gpu_kind(replace(H200, name=name), Config(model=MODEL))
    assert got.name == kind
    assert got.memory_bytes == 150754820096.0  # what the card has, not what its sheet says


def test_a_card_in_mig_instances_is_left_out_and_theirs_are_no_whole_cards_figures() -> None:
    """What computes on a card that is divided gets one of its instances, whatever the card's own figures say."""
    parent = replace(H200, note="MIG is on: its instances are devices of their own")
    one = replace(H200, id="MIG-1", name="NVIDIA H200 MIG 1g.18gb", memory_total_bytes=18.0 * 2**30)
    free, notes = fleet.free_cards(report(parent, one), visible_devices=None, owner_of=lambda _: None, own_run=None)
    assert [g.id for g in free] == ["MIG-1"]
    assert "MIG is on" in notes[0]
    with pytest.raises(FleetError, match=r'\[fleet.kinds."NVIDIA H200 MIG 1g.18gb"\]'):
        gpu_kind(one, Config(model=MODEL))


def test_an_unknown_card_is_an_error_that_says_what_to_declare() -> None:
    card = replace(H200, name="NVIDIA GTX 750")
    with pytest.raises(FleetError, match=r'\[fleet.kinds."NVIDIA GTX 750"\]'):
        gpu_kind(card, Config(model=MODEL))
    section = KindSection(peak_flops=1e12, hbm=1e11, memory=2e9, link=1e10)
    config = Config(model=MODEL, fleet=FleetSection(kinds={"NVIDIA GTX 750": section}))
    assert gpu_kind(card, config).peak_flops == 1e12


def test_a_claim_holds_as_long_as_its_processes(tmp_path: Path) -> None:
    """A second run is refused by name; when the owner's last process ends the device is free again."""
    holder = subprocess.Popen(["sleep", "60"])
    held = mark(holder.pid)
    mine = mark(subprocess.os.getpid())  # type: ignore[attr-defined]
    assert held is not None
    assert mine is not None
    claim(["GPU-a", "GPU-b"], "first", [held], tmp_path)
    assert owner("GPU-a", tmp_path) == "first"
    claim(["GPU-a"], "first", [held], tmp_path)  # again is nothing new
    with pytest.raises(FleetError, match="first"):
        claim(["GPU-c", "GPU-b"], "second", [mine], tmp_path)
    assert owner("GPU-c", tmp_path) is None  # all or nothing
    holder.kill()
    holder.wait(5)
    assert owner("GPU-a", tmp_path) is None
    claim(["GPU-a"], "second", [mine], tmp_path)
    assert owner("GPU-a", tmp_path) == "second"


def test_a_torn_claim_is_no_claim(tmp_path: Path) -> None:
    (tmp_path / "GPU-a.json").write_text('{"run": "x", "proc')
    assert owner("GPU-a", tmp_path) is None


def test_memory_counts_as_back_only_by_a_fresh_reading() -> None:
    """A card that still lists a process keeps its device from use, by name; a free one does not."""
    busy, free = report(replace(H200, pids=(9,))), report(H200)
    why = memory_back(lambda: (busy, 0.0), ("GPU-a",), deadline_s=0.5)
    assert "processes 9" in why
    assert memory_back(lambda: (free, 0.0), ("GPU-a",), deadline_s=5.0) == ""
    assert "no reading" in memory_back(lambda: (free, 60.0), ("GPU-a",), deadline_s=0.5)
    assert memory_back(lambda: (busy, 0.0), ("dev0",), deadline_s=0.1) == ""


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_part_says_whose_it_is(parts: int) -> None:
    """Card and number of parts are read back from the id, also of a MIG instance's old name; what is no card has no parts."""
    for card in ("GPU-4f1e", "MIG-GPU-4f1e/1/0", "MIG-9c"):
        ids = part_ids(card, parts)
        assert len(set(ids)) == parts
        assert {(card_of(i), parts_of(i), is_gpu(i)) for i in ids} == {(card, parts, True)}
    assert cards_of((*part_ids("GPU-b", parts), "GPU-a", "cpu-n0-0", "GPU-b")) == ("GPU-b", "GPU-a")
    assert (parts_of("paced-n0-1"), is_gpu("paced-n0-1")) == (1, False)


def found_with(
    *cards: GpuReading, owners: dict[str, str] | None = None, own_run: str | None = None, **section: object
) -> fleet.Discovery:
    """What a run makes of those free cards."""
    config = Config(model=MODEL, fleet=FleetSection(**section))  # type: ignore[arg-type]
    return fleet.of_cards(config, cards, owner_of=(owners or {}).get, own_run=own_run)


def test_one_gpu_alone_is_two_devices() -> None:
    """Each with half of its memory, speed and price, under the card's curves; said in words."""
    found = found_with(H200, source="gpus", prices={"H200": 4.0})
    assert [d.id for d in found.cluster.devices] == ["GPU-a:1of2", "GPU-a:2of2"]
    assert [d.index for d in found.cluster.devices] == [0, 1]
    [kind] = found.cluster.kinds.values()
    assert (kind.name, kind.base, kind.memory_bytes, kind.price_usd_per_h) == ("H200 1/2", "H200", 75377410048.0, 2.0)
    assert (kind.train_efficiency, kind.rollout_efficiency, kind.card_share) == (1.0, 1.0, 0.5)
    assert kind.undivided().peak_flops == CATALOGUE["H200"].peak_flops
    assert found.label == "gpu"
    assert "take turns" in found.notes[-1]


def test_two_gpus_stay_whole_unless_told() -> None:
    other = replace(H200, id="GPU-b", index=1, pci="0:07")
    assert [d.id for d in found_with(H200, other, source="gpus").cluster.devices] == ["GPU-a", "GPU-b"]
    found = found_with(H200, other, source="gpus", gpu_parts=2).cluster
    assert [d.id for d in found.devices] == ["GPU-a:1of2", "GPU-a:2of2", "GPU-b:1of2", "GPU-b:2of2"]
    assert [d.id for d in found_with(H200, source="gpus", gpu_parts=1).cluster.devices] == ["GPU-a"]


def test_a_run_with_one_card_keeps_its_parts_when_another_becomes_free() -> None:
    """What its devices are called is in its ledger and plans. For a new run both are there."""
    other = replace(H200, id="GPU-b", index=1, pci="0:07")
    mine = found_with(H200, other, owners={"GPU-a": "mine"}, own_run="mine").cluster
    assert [d.id for d in mine.devices][:2] == ["GPU-a:1of2", "GPU-a:2of2"]
    assert [d.id for d in found_with(H200, other, own_run="new").cluster.devices] == ["GPU-a", "GPU-b"]


def test_a_part_is_free_again_while_the_other_computes() -> None:
    """The other's process is no obstacle; its own memory is."""
    other = report(replace(H200, pids=(9,), memory_used_bytes=60e9))
    both = report(replace(H200, pids=(9,), memory_used_bytes=100e9))
    assert memory_back(lambda: (other, 0.0), ("GPU-a:1of2",), deadline_s=5.0) == ""
    why = memory_back(lambda: (both, 0.0), ("GPU-a:1of2",), deadline_s=0.5)
    assert "100.0 GB in use" in why


def test_bodies_on_parts_of_one_card_share_it() -> None:
    """Each sees the card by its UUID, may take half of its memory, and asks Ray for half a GPU; whole cards are asked for whole."""
    half = CATALOGUE["H200"].in_parts(2)
    kinds = {half.name: half, "H200": CATALOGUE["H200"]}
    devices = tuple(
        Device(id=i, kind=half.name if ":" in i else "H200", node="n0")
        for i in (*part_ids("GPU-a", 2), "GPU-b", "GPU-c")
    )
    link = Link(latency_s=1e-5, bytes_per_s=1e10)
    world = World(
        ray=None,
        run_id="r",
        hexctl_version="0",
        daemon_epoch=1,
        config=Config(model=MODEL),
        paths=RunPaths(folder=Path("unused"), short=Path("unused")),
        cluster=Cluster(kinds=kinds, devices=devices, same_kind=link, cross_kind=link),
        limits=RunLimits(),
    )
    trainer, replica = (world.identity(f"b{i}", f"b{i}", 1, (d.id,)) for i, d in enumerate(devices[:2]))
    assert (trainer.gpus, trainer.gpu_share, trainer.kind) == (("GPU-a",), 0.5, "H200 1/2")
    assert (replica.gpus, replica.gpu_share) == (("GPU-a",), 0.5)
    assert trainer.devices != replica.devices
    first, second = (world.bundle((d.id,)) for d in devices[:2])
    assert (first["GPU"], second["GPU"]) == (0.5, 0.5)
    assert first.keys() & second.keys() == {"GPU"}
    whole = world.identity("r9", "r9", 1, ("GPU-b", "GPU-c"))
    assert (whole.gpus, whole.gpu_share, world.bundle(whole.devices)["GPU"]) == (("GPU-b", "GPU-c"), 1.0, 2.0)
