"""Measuring this machine for real, as little of it as possible."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.calibration import Calibration, GemmPoint, KindTables, Provenance, decode
from planner.record import replace
from runtime.config.load import load_config
from runtime.profile import link
from runtime.profile.agenda import Machine, Order
from runtime.profile.measure import Measured, Progress, measure
from runtime.profile.node import measured_of, measured_text
from runtime.profile.summary import kind_summary, merged_tables
from runtime.rl.pacing import load_pacing

ROOT = Path(__file__).resolve().parents[2]
HERE = Machine(host="here", cores=1)


def test_kernels_and_engine_of_the_cpu() -> None:
    seen: list[Progress] = []
    order = Order(quick=True, only=("gemm", "copy", "decode", "prefill"))
    found = measure(HERE, order, config=None, today="2026-01-02", on_progress=seen.append)
    assert found.notes == ()
    [tables] = found.tables
    assert (tables.kind, tables.provenance.how, tables.provenance.measured_on) == ("host-cpu", "measured", "2026-01-02")
    assert tables.gemm
    assert tables.hbm_copy
    assert tables.prefill
    assert tables.decode
    # A CPU core does at least a tenth of a GFLOP/s and at most a few hundred: the unit is right.
    summary = kind_summary(tables)
    assert 1e8 < summary["gemm_flops"] < 1e13
    assert 1e7 < summary["copy_bytes_per_s"] < 1e12
    assert [p.done for p in seen] == [0, 1, 2, 3, 4]
    assert seen[-1].left_s == 0
    assert measured_of(measured_text(found)) == found


def test_the_engine_and_the_trainer_at_a_reference_size() -> None:
    found = measure(HERE, Order(quick=True, only=("engine", "trainer")), config=None, today="2026-01-02")
    [tables] = found.tables
    assert {e.phase for e in tables.engine} >= {"decode"}
    assert all(e.tokens_per_s > 1 for e in tables.engine)
    assert tables.trainer[0].tokens_per_s > 1


def test_collectives_between_processes_of_this_machine() -> None:
    found = measure(replace(HERE, cores=2), Order(quick=True, only=("collectives",)), config=None, today="2026-01-02")
    assert found.notes == ()
    [tables] = found.tables
    assert {c.op for c in tables.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert {c.ranks for c in tables.collectives} == {2}


@pytest.mark.accept
def test_paced_devices_come_out_as_fast_as_they_are_paced() -> None:
    config = load_config(ROOT / "configs" / "local.toml").config
    found = measure(HERE, Order(quick=True, paced=("wide",), cpu=False), config=config, today="2026-01-02")
    [tables] = found.tables
    assert config.fleet.pacing is not None
    declared = load_pacing(config.fleet.pacing).kind("wide")
    assert tables.provenance.how == "paced"
    for e in tables.engine:
        if e.phase == "decode":
            assert e.tokens_per_s == pytest.approx(e.running / declared.decode_step_s, rel=0.1)
    assert tables.trainer[0].tokens_per_s == pytest.approx(declared.train_tokens_per_s, rel=0.1)


def test_what_fails_is_named_and_the_rest_is_measured() -> None:
    config = load_config(ROOT / "configs" / "local.toml").config
    order = Order(quick=True, paced=("unheard-of",), cpu=True, only=("paced", "copy"))
    found = measure(HERE, order, config=config, today="2026-01-02")
    assert [t.kind for t in found.tables] == ["host-cpu"]
    assert "unheard-of" in found.notes[0]


def test_told_to_stop_it_stops() -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(HERE, Order(), config=None, today="2026-01-02", should_stop=lambda: True)


def profile(*words: str, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "runtime.profile", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **more},
    )


def test_the_file_keeps_other_kinds(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    old = KindTables(kind="H100", provenance=Provenance(source="a test", how="measured"))
    from planner.calibration import encode

    out.write_text(encode(Calibration(kinds=(old,))))
    child = profile("--quick", "--only", "copy", "--out", str(out))
    text, talk = child.communicate(timeout=240)
    assert child.returncode == 0, talk
    assert [k["kind"] for k in json.loads(text)["kinds"]] == ["host-cpu"]
    assert "1 of 1, RAM copy (host-cpu), about" in talk
    assert [t.kind for t in decode(out.read_text()).kinds] == ["H100", "host-cpu"]
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


@pytest.fixture
def measuring(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    child = profile("--out", str(tmp_path / "calibration.json"))
    yield child
    if child.poll() is None:
        child.kill()
    child.communicate()


@pytest.mark.kill
def test_ctrl_c_ends_it_and_writes_nothing(measuring: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert measuring.stderr is not None
    assert "1 of" in measuring.stderr.readline()
    measuring.send_signal(signal.SIGINT)
    _, talk = measuring.communicate(timeout=200)
    assert measuring.returncode == 130
    assert talk.index("stopping: what is under way ends first") < talk.index("interrupted: nothing was written")
    assert list(tmp_path.iterdir()) == []


def test_a_link_between_two_ends() -> None:
    said: list[str] = []
    told = threading.Event()

    def say(what: object) -> None:
        said.append(str(what))
        told.set()

    serving = threading.Thread(target=link.serve, args=({"address": "127.0.0.1"}, say, lambda: False), daemon=True)
    serving.start()
    assert told.wait(60)
    place = {"address": "127.0.0.1", **json.loads(said[0])}
    found = json.loads(link.send(place, lambda _: None, lambda: False))
    serving.join(60)
    assert not serving.is_alive()
    assert 0 < found["latency_s"] < 1
    assert set(found["bytes_per_s"]) == {"1", "4"}
    assert all(rate > 1e6 for rate in found["bytes_per_s"].values())


def test_of_several_nodes_the_one_with_most_points_is_kept_and_a_slow_one_is_named() -> None:
    def node(host: str, seconds: tuple[float, ...]) -> Measured:
        gemm = tuple(GemmPoint(m=64 * (i + 1), n=64, k=64, dtype="bf16", seconds=s) for i, s in enumerate(seconds))
        tables = KindTables(kind="H100", provenance=Provenance(source="a test", how="measured", host=host), gemm=gemm)
        return Measured(host=host, tables=(tables,), notes=(), seconds=1.0)

    merged, notes = merged_tables([node("a", (1e-6,)), node("b", (1e-6, 4e-6)), node("c", (2e-6,))])
    assert [t.provenance.host for t in merged.kinds] == ["b"]
    assert notes == ("H100 of c computes at 0.50 of that of b, which is kept",)
    assert merged_tables([]) == (Calibration(), ())


@pytest.mark.gpu
def test_the_cards_of_this_machine() -> None:
    """In a process of its own, as the command does it: the cards are chosen before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        pytest.skip(
            "this process holds a card, which is then not measured: run this file by itself, as `make gpu` does"
        )
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "runtime.profile", "--quick"],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [n["notes"] for n in document["nodes"]] == [[]]
    for kind in document["kinds"]:
        assert kind["how"] == "measured"
        assert kind["gemm_flops"] > 1e13  # any card with matrix units
        assert kind["copy_bytes_per_s"] > 1e11
        assert kind["links_bytes_per_s"]["host_to_device"] > 1e9
        assert {e["phase"] for e in kind["engine"]} == {"decode", "prefill"}
        assert kind["trainer"]


@pytest.mark.gpu
def test_a_card_is_timed_whichever_is_the_current_one() -> None:
    """Events on another card's stream would see none of the work."""
    import torch

    from runtime.profile.timing import seconds_of

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    a = torch.randn(4096, 4096, device="cuda:1", dtype=torch.bfloat16)
    found = []
    for current in (0, 1):
        with torch.cuda.device(current):
            found.append(seconds_of(lambda _: a @ a, a.device, 0.2))
    assert found[0] == pytest.approx(found[1], rel=0.3)
