"""Nonsense in a configuration is one error that names each fault with file and line; sense survives a copy."""

import re
from pathlib import Path

import pytest

from hexctl.data import data_folder
from runtime.config.load import leaves, load_config, resolved_toml
from runtime.errors import ConfigError

GOOD = """\
[model]
source = "seeded"
path = "model"
[task]
source = "copy"
[fleet]
source = "paced"
pacing = "speeds.toml"
[fleet.kinds.fast]
peak_flops = "2 GFLOP/s"
hbm = "400 Mbit/s"
memory = "64 MiB"
link = 1e6
[[fleet.devices]]
kind = "fast"
"""
SHIPPED = sorted(data_folder("configs").glob("*.toml"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "speeds.toml").write_text("")
    (tmp_path / "run.toml").write_text(GOOD)
    return tmp_path


def fails(path: Path, **options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)
    return str(caught.value)


def test_a_good_file_loads_in_si_units_with_absolute_paths(folder: Path) -> None:
    loaded = load_config(folder / "run.toml")
    kind = loaded.config.fleet.kinds["fast"]
    assert (kind.peak_flops, kind.hbm, kind.memory, kind.link) == (2e9, 5e7, 64 * 2**20, 1e6)
    assert loaded.config.model.path == folder / "model"
    assert loaded.config.fleet.pacing == folder / "speeds.toml"
    assert loaded.origins["fleet.kinds.fast.hbm"] == f"{folder}/run.toml:11"
    assert "algorithm.eta" not in loaded.origins


# (line to put in place of which line, what the message must say, on which line of the file)
NONSENSE = [
    (3, 'paht = "model"', 'model.paht: unknown key', "did you mean path?", 3),
    (3, "path = 7", "model.path: bad value", "got 7", 3),
    (2, 'source = "sown"', "model.source: bad value", "'pretrained'", 2),
    (2, "source = true", "model.source: bad value", "got True", 2),
    (5, 'source = "jsonl"', 'task: task.path is needed for source = "jsonl"', "", 4),
    (5, 'source = "copy"\nmin_length = 9\nmax_length = 3', "task.min_length must not exceed", "", 4),
    (5, 'source = "copy"\nreward = "callable"', "task.callable is needed", "", 4),
    (7, 'source = "paced"\nprices = {fast = -1}', "fleet.prices.fast: bad value", "got -1", 8),
    (7, 'source = "paced"\nprices = {fast = "3"}', "fleet.prices.fast: bad value", "got '3'", 8),
    (7, 'source = "paced"\nprices = {fast = nan}', "fleet.prices.fast: not a finite number", "got nan", 8),
    (8, "", 'fleet.pacing is needed for source = "paced"', "", 6),
    (8, 'pacing = "nowhere.toml"', "fleet.pacing: not there", "nowhere.toml", 8),
    (10, 'peak_flops = "2 GB"', "fleet.kinds.fast.peak_flops: not a compute rate", "got '2 GB'", 10),
    (11, 'hbm = "-4 GB/s"', "fleet.kinds.fast.hbm: bad value", "greater than 0", 11),
    (12, "memory = 0", "fleet.kinds.fast.memory: bad value", "got 0", 12),
    (12, "memory = inf", "fleet.kinds.fast.memory: not a finite number", "", 12),
    (12, 'memory = ["64 MB"]', "fleet.kinds.fast.memory: not an amount of memory", "", 12),
    (13, "", "fleet.kinds.fast.link: missing", "", 9),
    (15, 'kind = "cart"', "fleet.devices.0.kind: unknown device kind", "got 'cart'", 15),
    (15, 'kind = "fast"\ncount = 0', "fleet.devices.0.count: bad value", "got 0", 16),
    (15, 'kind = "fast"\ncount = 1.5', "fleet.devices.0.count: bad value", "got 1.5", 16),
    (15, 'kind = "fast"\n[algorithm]\neta = -1', "algorithm.eta: bad value", "got -1", 17),
    (15, 'kind = "fast"\n[algorithm]\nresponses_per_prompt = "8"', "responses_per_prompt: bad value", "got '8'", 17),
    (15, 'kind = "fast"\n[run]\nname = "../evil"', "run.name: bad value", "got '../evil'", 17),
    (15, 'kind = "fast"\n[plannner]', "plannner: unknown key", "did you mean planner?", 16),
    (15, 'kind = "fast"\n[model]', "not TOML", "", 16),
    (3, 'path = "model', "not TOML", "", 3),
    (3, 'path = "empty"', "model.path: not there", "empty", 3),
    (3, 'path = "model"\ntokenizer = "nowhere"', "model.tokenizer: not there", "nowhere", 4),
    (5, 'source = "jsonl"\npath = "none.jsonl"', "task.path: not there", "none.jsonl", 6),
    (5, 'source = "jsonl"\npath = "speeds.toml"', "task.path: empty data file", "speeds.toml", 6),
    (2, 'source = "pretrained"', "model.path: no weights there", "safetensors", 3),
]  # fmt: skip


@pytest.mark.parametrize("case", NONSENSE, ids=[n[1].replace("\n", "; ") for n in NONSENSE])
def test_nonsense(folder: Path, case: tuple[int, str, str, str, int]) -> None:
    at, text, what, more, line = case
    rows = GOOD.split("\n")
    rows[at - 1] = text
    path = folder / "run.toml"
    path.write_text("\n".join(rows))
    message = fails(path)
    assert what in message
    assert more in message
    assert f"{path}:{line}: " in message
    assert "pydantic" not in message


def test_of_a_long_path_the_file_is_named(folder: Path) -> None:
    """A checkout may lie deep: what is wrong is at the end of the path."""
    deep = folder / ("a" * 60) / ("b" * 60)
    deep.mkdir(parents=True)
    path = deep / "run.toml"
    path.write_text(GOOD.replace('path = "model"', 'path = "lost-model"'))
    message = fails(path)
    assert "bbb/lost-model'" in message
    assert str(deep / "lost-model") not in message


def test_all_faults_at_once_in_the_order_of_the_file(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text(
        GOOD.replace('"copy"', '"paste"').replace("[model]", "[model]\ncolour = 1").replace("1e6", '"fast"')
    )
    message = fails(path)
    assert message.startswith(f"{path}: 3 faults\n")
    assert re.findall(r"run\.toml:(\d+): ([a-z_.]+): ", message) == [
        ("2", "model.colour"), ("6", "task.source"), ("14", "fleet.kinds.fast.link"),
    ]  # fmt: skip


@pytest.mark.parametrize("raw", [b"", b"x", b"\xff", b"[model]\n\xc3(", b"a = " + b"[" * 5000, b"\x00"])
def test_a_file_that_is_no_configuration(folder: Path, raw: bytes) -> None:
    path = folder / "run.toml"
    path.write_bytes(raw)
    assert str(path) in fails(path)


def test_unreadable(folder: Path) -> None:
    assert "No such file" in fails(folder / "none.toml")
    assert "directory" in fails(folder)


def test_overrides(folder: Path) -> None:
    path = folder / "run.toml"
    changed = load_config(path, overrides={"fleet.source": "auto", "algorithm.eta": "0", "fleet.devices.0.count": "3"})
    assert (changed.config.fleet.source, changed.config.algorithm.eta) == ("auto", 0)
    assert changed.config.fleet.devices[0].count == 3
    assert changed.origins["algorithm.eta"] == "--set"
    assert changed.sha256 != load_config(path).sha256
    assert fails(path, overrides={"nonsense.eta": "1"}).startswith("--set nonsense: nonsense: unknown key")
    assert fails(path, overrides={"algorithm.eta": "many"}).startswith("--set algorithm.eta: algorithm.eta: bad value")
    unknown = fails(path, overrides={"fleet.devices.0.kind": "cart"})
    assert unknown.startswith("--set fleet.devices.0.kind: fleet.devices.0.kind: unknown device kind")
    for key in ("fleet.devices.7.count", "model.path.deeper", "", "model."):
        assert f"--set {key}" in fails(path, overrides={key: "1"})


def test_a_copy_in_a_run_folder_is_the_same_configuration(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    loaded = load_config(folder / "run.toml")
    copy = tmp_path_factory.mktemp("elsewhere") / "config.toml"
    copy.write_text(resolved_toml(loaded))
    again = load_config(copy)
    assert again.config == loaded.config
    assert again.sha256 == loaded.sha256


def test_comments_and_order_do_not_make_another_configuration(folder: Path) -> None:
    head, _, tail = GOOD.partition("[task]")
    (folder / "other.toml").write_text("# hello\n[task]" + tail + head)
    assert load_config(folder / "other.toml").sha256 == load_config(folder / "run.toml").sha256


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_configuration_decodes(path: Path) -> None:
    loaded = load_config(path, check_files=False)
    assert {"model.path", "algorithm.eta", "fleet.source"} <= dict(leaves(loaded.config)).keys()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_configuration_has_its_files(path: Path) -> None:
    try:
        load_config(path)
    except ConfigError as e:
        if "/data/" in str(e):
            pytest.skip(f"data that is not shipped is absent: {e.what}")
        raise
