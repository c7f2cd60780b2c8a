"""`hexctl plan` with money in the question: answers, purity of stdout, and nonsense."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hexctl.cli.commands.plan_market import usd_per_h
from hexctl.cli.main import main
from runtime.config.market import load_market
from runtime.errors import ConfigError

MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = """\
[model]
source = "shape"
path = "model.json"
[algorithm]
prompts_per_step = 16
[lengths]
response_mean = 300
response_max = 2000
[planner]
capabilities = "unrestricted"
[fleet]
source = "declared"
[[fleet.devices]]
kind = "H20"
count = 4
per_node = 2
node = "h20-{i}"
[[fleet.devices]]
kind = "H800"
count = 2
node = "h800"
"""
MARKET = """\
[market]
name = "test"
as_of = "2024-07"
[[instances]]
name = "pair"
region = "east"
kind = "H800"
gpus = 2
price_usd_per_h = 10.0
spot_usd_per_h = 4.0
available = 2
node_memory = "512 GB"
[[instances]]
name = "wide"
region = "west"
kind = "H20"
gpus = 2
price_usd_per_h = 3.5
available = 3
[[egress]]
from = "east"
to = "west"
usd_per_gb = 0.02
[[egress]]
from = "west"
to = "east"
usd_per_gb = 0.02
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "small.toml").write_text(CONFIG)
    return str(tmp_path / "small.toml")


@pytest.fixture
def market(tmp_path: Path) -> str:
    (tmp_path / "market.toml").write_text(MARKET)
    return str(tmp_path / "market.toml")


def call(capfd: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    got = main(["plan", *argv])
    out, err = capfd.readouterr()
    assert got == code, err
    assert "Traceback" not in err
    return out, err


def test_a_budget_on_a_market(config: str, market: str, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, config, "--budget", "$17/h", "--market", market, "-o", "json")
    document = json.loads(out)
    assert err == ""
    rental = document["rental"]
    assert document["usd_per_h"] == rental["usd_per_h"] <= 17
    assert sum(i["count"] * {"pair": 10.0, "wide": 3.5}[i["instance"]] for i in rental["mix"]) == rental["usd_per_h"]
    assert rental["measure"] == "tokens_per_s"
    assert rental["achieved"] == document["tokens_per_s"] <= rental["bound"]
    text, _ = call(capfd, config, "--budget", "17", "--market", market)
    assert text.startswith("rent ")
    for word in ("price", "bound", "mixes within $17.00/h", "train", "rollout"):
        assert word in text


def test_the_other_questions(config: str, market: str, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capfd, config, "--frontier", "--market", market, "-o", "json")
    points = json.loads(out)["points"]
    prices, rates = [p["usd_per_h"] for p in points], [p["tokens_per_s"] for p in points]
    assert len(points) > 1
    assert prices == sorted(prices)
    assert rates == sorted(rates)
    assert "$/MTOK" in call(capfd, config, "--frontier", "--market", market)[0]
    out, _ = call(capfd, config, "--reach", str(rates[0] * 1.01), "--market", market, "-o", "json")
    assert json.loads(out)["usd_per_h"] == prices[1]
    out, _ = call(capfd, config, "--reach", str(rates[0]), "--per-dollar", "--market", market, "-o", "json")
    assert json.loads(out)["rental"]["measure"] == "tokens_per_usd"
    spot = ("--spot", "--spot-interruptions-per-h", "0.05")
    out, _ = call(capfd, config, "--steps", "1000", "--within", "30d", "--market", market, *spot, "-o", "json")
    job = json.loads(out)["rental"]["job"]
    assert job["total_usd"] == pytest.approx(job["machines_usd"] + job["egress_usd"])
    assert "job " in call(capfd, config, "--steps", "1000", "--within", "30d", "--market", market)[0]


def test_without_a_market_the_fleets_machines_are_on_offer(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads(call(capfd, config, "--budget", "14.2601", "-o", "json")[0])
    assert document["usd_per_h"] <= 14.2601  # 2 x 5.28 + 2 x 1.85
    assert {i["instance"] for i in document["rental"]["mix"]} <= {"2xH20", "2xH800"}


def test_robust(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked = (config, "--robust", "--lengths", "100,1x,1000", "--etas", "1,4")
    robust = json.loads(call(capfd, *asked, "-o", "json")[0])["robust"]
    assert [r["response_mean"] for r in robust["regrets"]] == [100, 300, 1000] * 2
    assert robust["worst_regret"] == max(r["regret"] for r in robust["regrets"])
    text, _ = call(capfd, *asked)
    assert "worst-case regret" in text
    assert "plan again" in text or "nowhere in that range" in text


@pytest.mark.parametrize("text", ["126.72", "$126.72", "126.72/h", " $126.72/h "])
def test_a_budget_is_usd_an_hour(text: str) -> None:
    assert usd_per_h(text) == 126.72


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        (["--budget", "-5"], 2, "more than 0"),
        (["--budget", "nan"], 2, "more than 0"),
        (["--budget", "30s"], 2, "--solve-time"),
        (["--budget", "3"], 5, "less than the cheapest instance, wide at $3.50/h"),
        (["--reach", "1e12"], 5, "no mix of what the market has reaches it"),
        (["--reach", "-1"], 2, "'--reach': -1 is not a number above 0"),
        (["--reach", "nan"], 2, "'--reach': nan is not a number above 0"),
        (["--robust", "--threshold", "inf"], 2, "'--threshold': inf is not a number above 0"),
        (["--frontier", "--budget", "1"], 5, "less than the cheapest instance"),
        (["--steps", "5"], 2, "--within go together"),
        (["--steps", "0", "--within", "1h"], 2, "steps must be at least 1"),
        (["--steps", "9", "--within", "1h", "--spot"], 2, "--spot-interruptions-per-h"),
        (["--steps", "1000000", "--within", "1s"], 5, "reaches it"),
        (["--budget", "9", "--reach", "9"], 2, "different questions"),
        (["--per-dollar", "--budget", "9"], 2, "--per-dollar needs --reach"),
        ([], 2, "--market needs"),
        (["--robust"], 2, "leave out --market"),
        (["--budget", "9", "--compare", "hex,areal-hex"], 2, "--compare"),
    ],
)
def test_nonsense(
    config: str, market: str, asked: list[str], *, code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = call(capfd, config, "--market", market, *asked, code=code)
    assert out == ""
    assert says in err
    assert err.count("error:") == 1
    assert code != 5 or "hint: loosen the limit" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "offers nothing"),
        ("[[instances]]\n", "instances.0.name: Field required"),
        (MARKET.replace('kind = "H20"', 'kind = "H21"'), "unknown kind"),
        (MARKET.replace("gpus = 2", "gpus = 0", 1), "instances.0.gpus"),
        (MARKET.replace("gpus = 2", 'gpus = "2"', 1), "instances.0.gpus"),
        (MARKET.replace("price_usd_per_h = 3.5", "price_usd_per_h = -3.5"), "instances.1.price_usd_per_h"),
        (MARKET.replace("price_usd_per_h = 3.5", "price_usd_per_h = nan"), "got nan"),
        (MARKET.replace("available = 3", "avaliable = 3"), "unknown key"),
        (MARKET.replace('name = "wide"', 'name = "pair"').replace('"west"\nkind', '"east"\nkind'), "listed twice"),
        ("instances = [", "not TOML"),
    ],
)
def test_bad_markets(config: str, tmp_path: Path, text: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text(text)
    out, err = call(capfd, config, "--budget", "9", "--market", str(tmp_path / "bad.toml"), code=2)
    assert out == ""
    assert says in err
    assert "error: " in err
    _, err = call(capfd, config, "--budget", "9", "--market", str(tmp_path / "absent.toml"), code=2)
    assert "cannot be read" in err


def test_a_market_file_as_a_value(market: str) -> None:
    found = load_market(Path(market))
    assert [(i.name, i.gpus, i.available, i.spot_usd_per_h) for i in found.instances] == [
        ("pair", 2, 2, 4.0),
        ("wide", 2, 3, None),
    ]
    assert found.instances[0].node_memory_bytes == 512e9
    assert [(e.origin, e.to, e.usd_per_gb) for e in found.egress] == [("east", "west", 0.02), ("west", "east", 0.02)]
    with pytest.raises(ConfigError):
        load_market(Path(market).parent)


def test_ctrl_c_answers_with_the_best_so_far(config: str, tmp_path: Path) -> None:
    """A market too large to finish: the first Ctrl-C ends the search, stdout is the answer."""
    kinds = ("H800", "H20", "H100", "H200", "B200", "L40S", "A6000", "A100-40")
    rows = [
        f'[[instances]]\nname = "{k}"\nkind = "{k}"\ngpus = 2\nprice_usd_per_h = {10 + 3.1 * i}\navailable = 10\n'
        for i, k in enumerate(kinds)
    ]
    (tmp_path / "large.toml").write_text("".join(rows))
    argv = ["plan", config, "--budget", "90", "--market", str(tmp_path / "large.toml"), "-o", "json"]
    code = (
        "import sys, threading\nimport planner.desk as d\nfrom hexctl.cli.main import main\n"
        "whole = d.RentalDesk._rental\n"
        "def told(self, *a, **k):\n    print('found', file=sys.stderr, flush=True)\n    return whole(self, *a, **k)\n"
        "d.RentalDesk._rental = told\nsys.exit(main(sys.argv[1:]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, *argv, "--solve-time", "10m"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stderr.readline().strip() == "found"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=200)  # of the ten minutes that it had
    assert child.returncode == 0, err
    document = json.loads(out)
    assert document["rental"]["finished"] is False
    assert document["rental"]["bound"] >= document["rental"]["achieved"] > 0
    assert "stopping" in err
