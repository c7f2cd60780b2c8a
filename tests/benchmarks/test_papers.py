"""benchmarks.papers: reading the papers' figures, the arithmetic of both tables, the contradictions. Small rows of our own, worked
by hand; the papers' own files where they are there."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.__main__ import FOLDER, main
from benchmarks.papers.claims import (
    BASELINE,
    CHEAP,
    MIX,
    SMALL,
    Answers,
    Claim,
    asks,
    claims,
    compare,
    device_rate,
    over,
    over_per_usd,
    ratio,
)
from benchmarks.papers.contradictions import (
    contradictions,
    dollar_ratios,
    mixes_at,
    step_ratios,
    sync_shares,
    tokens_a_step,
)
from benchmarks.papers.figures import FILES, H800, HEX, MODELS, Figures, Latency, missing, read_figures
from benchmarks.papers.fleets import BASE, SHEETS, areal_hex, hetrl, sweep
from benchmarks.papers.measured import Rates, Split, best, predict, predictions, rates_of, speed_ratios, step_s
from benchmarks.papers.mixes import asks as mix_asks
from benchmarks.papers.mixes import compare as compare_mixes
from benchmarks.papers.mixes import mixes
from benchmarks.papers.plots import Bar, drawn
from benchmarks.papers.report import number, pair, table
from benchmarks.papers.scenarios import Case, Row
from benchmarks.papers.simulated import Simulated, section
from benchmarks.papers.solves import Ask, Outcome, Solves
from benchmarks.papers.words import near_text, overlap, verdict, where
from planner.errors import InvalidInput
from planner.record import replace

SETUP = """item,value,unit,note
H800 price,5,$/h,
H20 price,2,$/h,
H800 peak,756,TFLOPS,
H20 peak,148,TFLOPS,
H800 hbm,2000,GB/s,
H20 hbm,4000,GB/s,
inter-machine same kind,5,GB/s,
inter-machine across kinds,1.5,GB/s,
budget,120,$/h,24 H800
equal-throughput mix,88,$/h,
"""


def write(folder: Path, **others: str) -> Path:
    """The same small rows for every model."""
    latency, tokens, ratios = (
        ["model,system,infer_s,train_s,sync_s,source"],
        ["model,system,gpus,tokens_per_s,source"],
        [],
    )
    for m in MODELS:
        latency += [
            f"{m},AReaL H20 same budget,300,300,20,",
            f"{m},AReaL H800 x24,160,80,40,",
            f"{m},AReaL-Hex x56,100,90,25,",
            f"{m},32 H800,100,90,,",
            f"{m},88 H20,110,120,,",
            f"{m},24 H800 + 24 H20,50,40,,",
        ]
        tokens += [
            f"{m},AReaL H20 same budget,,100,", f"{m},AReaL H800,24,200,", f"{m},AReaL-Hex,56,300,",
            f"{m},AReaL H800 uniform allocation,24,125,", f"{m},AReaL-Hex,32,220,",
        ]  # fmt: skip
        ratios += [
            f"hex over 24 H800 same budget,{m},1.5,", f"hex over H20 same budget,{m},3,",
            f"H20 cheaper per token in rollout,{m},2.5,", f"H800 cheaper per token in training,{m},4,",
            f"tokens/s per $/h 24 GPUs,{m},2.2,", f"tokens/s per $/h 56 GPUs,{m},2.5,",
        ]  # fmt: skip
    ratios += [f"scheduling seconds {n} GPUs,,10," for n in (24, 32, 40, 56)]
    ratios.append("cost reduction at equal throughput,all,1.4,")
    hetrl_rows = [
        "scenario,mode,baseline,low,high",
        "S1,sync,verl,1.5,2.0",
        "S1,async,verl,1.1,10.5",
        "all,all,verl,3,3",
    ]
    texts = {
        "areal_hex_setup": SETUP,
        "areal_hex_latency": "\n".join(latency),
        "areal_hex_throughput": "\n".join(tokens),
        "areal_hex_ratios": "\n".join(["what,model,value,source", *ratios]),
        "hetrl_ratios": "\n".join(hetrl_rows),
        **others,
    }
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text + "\n")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Figures:
    return read_figures(write(tmp_path))


def test_rows_are_read_with_what_they_do_not_print(small: Figures) -> None:
    assert small.latency["7B", "AReaL-Hex x56"] == Latency(infer_s=100, train_s=90, sync_s=25)
    assert small.latency["7B", "32 H800"].sync_s is None
    assert small.tokens_per_s["7B", "AReaL H20 same budget", None] == 100
    assert small.ratios["scheduling seconds 24 GPUs", ""] == 10
    assert small.price(8, 24) == 88
    found = small.speed_up("S1", "sync", "verl")
    assert found is not None
    assert (found.low, found.high) == (1.5, 2.0)
    assert small.speed_up("S2", "sync", "verl") is None


def test_a_row_that_does_not_decode_is_named(tmp_path: Path) -> None:
    write(tmp_path, hetrl_ratios="scenario,mode,baseline,low,high\nS1,sync,verl,1,2\nS2,sync,verl,much,3")
    with pytest.raises(InvalidInput, match=r"hetrl_ratios\.csv:3"):
        read_figures(tmp_path)


def test_without_the_folder_it_says_what_is_missing_and_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing(tmp_path / "nowhere") == FILES
    assert main([str(tmp_path / "nowhere"), "--to", str(tmp_path / "docs")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FILES)
    assert not (tmp_path / "docs").exists()


def test_a_step_is_the_slower_side_and_sync(small: Figures) -> None:
    assert Latency(infer_s=100, train_s=90, sync_s=25).step_s == 125
    assert Latency(infer_s=90, train_s=100, sync_s=None).step_s == 100
    assert step_s(Latency(infer_s=3, train_s=7, sync_s=None), 2) == 9
    assert sync_shares(small) == dict.fromkeys(MODELS, 20.0)  # 25 of 125
    assert step_ratios(small) == dict.fromkeys(MODELS, pytest.approx(200 / 125))
    assert tokens_a_step(small)["7B", H800] == 200 * 200
    assert tokens_a_step(small)["7B", HEX] == 300 * 125


def test_prices_and_mixes_by_hand(small: Figures) -> None:
    assert dollar_ratios(small) == dict.fromkeys(MODELS, pytest.approx((220 / 88) / (200 / 120)))
    # 5a + 2b = 20: a is even.
    assert mixes_at(small, 20) == [(0, 10), (2, 5), (4, 0)]
    # In machines of eight (40 and 16 an hour) for at most 120.
    assert set(mixes(small)) == {
        *((0, b) for b in range(8, 57, 8)), *((8, b) for b in range(0, 41, 8)), *((16, b) for b in range(0, 17, 8)), (24, 0),
    }  # fmt: skip


def test_rates_from_costs_a_token(small: Figures) -> None:
    # 2.5 times cheaper at 2/5 of the price: as fast. 4 times cheaper at 5/2 of the price: ten times as fast.
    assert speed_ratios(small, "7B") == (pytest.approx(1.0), pytest.approx(10.0))
    rates = rates_of(small, "7B", Latency(infer_s=160, train_s=80, sync_s=40), 24, 8)
    assert rates.h800_rollout == pytest.approx(1 / (160 * 16))
    assert rates.h800_train == pytest.approx(1 / (80 * 8))
    assert rates.h20_rollout == pytest.approx(rates.h800_rollout)
    assert rates.h20_train == pytest.approx(rates.h800_train / 10)


RATES = Rates(h800_rollout=0.01, h800_train=0.02, h20_rollout=0.005, h20_train=0.002)


def test_rates_add_up() -> None:
    seen = predict(RATES, 4, 8, Split(h800=3, h20=2))
    assert seen.infer_s == pytest.approx(1 / (1 * 0.01 + 6 * 0.005))
    assert seen.train_s == pytest.approx(1 / (3 * 0.02 + 2 * 0.002))
    assert predict(RATES, 4, 8, Split(h800=4, h20=8)).infer_s == float("inf")


@given(h800=st.integers(1, 6), h20=st.integers(1, 6), a=st.integers(0, 6), b=st.integers(0, 6))
def test_no_split_is_better_than_the_best(h800: int, h20: int, a: int, b: int) -> None:
    split, seen = best(RATES, h800, h20)
    assert predict(RATES, h800, h20, split) == seen
    assert seen.step_s < float("inf")
    other = predict(RATES, h800, h20, Split(h800=min(a, h800), h20=min(b, h20)))
    assert seen.step_s <= other.step_s
    assert best(RATES, h800, h20 + 1)[1].step_s <= seen.step_s, "one GPU more never hurts"


def test_predictions_put_the_paper_s_rates_together(small: Figures) -> None:
    found = {(p.section, p.what): p for p in predictions(small)}
    only = found["figure 3", "8 H800 + 48 H20 over 24 H800, only H800 train, 7B"]
    # With 8 training: rollout 160 * 16 / 48 = 53.3 s, training 80 s, sync 25; the homogeneous step is 200 s.
    assert only.value == pytest.approx(200 / (80 + 25))
    assert only.paper == 1.5
    assert found["figure 4", "rollout seconds of 8 H800 + 48 H20, only H800 train, 7B"].value == pytest.approx(160 / 3)
    share = found["figure 4", "sync, % of a step of 8 H800 + 48 H20, only H800 train, 7B"]
    assert share.value == pytest.approx(100 * 25 / 105)
    assert share.paper == pytest.approx(20)
    free = found["figure 3", "8 H800 + 48 H20 over 24 H800 at the best split, 7B"]
    assert all(f >= o for (_, f), (_, o) in zip(free.values, only.values, strict=True))


def outcome(rate: float) -> Outcome:
    return Outcome(
        tokens_per_s=rate, step_s=1, train_s=1, rollout_s=1, update_s=0, even_tokens_per_s=None, train={}, rollout={}
    )


def answered(figures: Figures, found: Sequence[Claim], rates: dict[tuple[int, int], float]) -> Solves:
    """Every question of those claims answered by the number of H800 and H20, whatever the inputs and the scheduler."""
    solves = Solves()
    for ask in asks(solves, figures, found, sweep()):
        kinds = [d.kind for d in ask.problem.cluster.devices]
        rate = rates.get((kinds.count("H800"), kinds.count("H20")))
        solves.remember(ask, None if rate is None else outcome(rate))
    return solves


def asked(figures: Figures) -> list[Claim]:
    """The 7B claims of two figures, and one of Table 4 for its fleet."""
    return [c for c in claims(figures) if c.model == "7B" and c.section in ("figure 2", "figure 3", "table 4")]


def test_ratios_by_hand(small: Figures) -> None:
    x = Answers(solves=answered(small, asked(small), {MIX: 300.0, BASELINE: 200.0}), model="7B", figures=small)
    assert over(MIX, BASELINE)(x, BASE, "hex") == 1.5
    assert over_per_usd(MIX, BASELINE)(x, BASE, "hex") == pytest.approx((300 / 136) / (200 / 120))
    assert over(MIX, CHEAP)(x, BASE, "hex") is None, "no plan, no ratio"
    assert ratio(1.0, None) is None
    assert ratio(None, 2.0) is None
    assert ratio(3.0, 2.0) == 1.5


def test_a_claim_beside_its_sweep(small: Figures) -> None:
    """The mix is 1.4 times as fast everywhere: near the printed 1.5, and hex ties with both papers' schedulers."""
    solves = answered(small, asked(small), {MIX: 280.0, BASELINE: 200.0, (0, 60): 140.0, CHEAP: 100.0, SMALL: 90.0})
    found = {c.claim.what: c for c in compare(solves, small, asked(small))}
    over_h800 = found["8 H800 + 48 H20 over 24 H800, 7B"]
    assert (over_h800.base, over_h800.low, over_h800.high) == (pytest.approx(1.4),) * 3
    assert over_h800.near == sweep()
    assert verdict(over_h800) == "within 10 % at the shipped assumptions too"
    assert near_text(over_h800).startswith(f"{len(sweep())} of {len(sweep())}: 300, 1,000")
    assert over_h800.beats == ((1.0, 1.0), (1.0, 1.0))
    over_h20 = found["8 H800 + 48 H20 over 60 H20, 7B"]
    assert (over_h20.base, over_h20.near) == (pytest.approx(2.0), ())
    assert verdict(over_h20) == "the paper is 1.5x above all that was swept"
    assert near_text(over_h20).startswith(f"0 of {len(sweep())}; nearest 2.00")
    assert verdict(found["24 H800 + 24 H20 over 32 H800, 7B"]) == "no plan"


def test_every_claim_has_a_figure_of_the_paper(small: Figures) -> None:
    found = list(claims(small))
    assert len({(c.section, c.what) for c in found}) == len(found)
    by_what = {c.what: c.paper for c in found}
    assert by_what["best split of 24 H800 over 12 + 12, 7B"] == pytest.approx(200 / 125)
    assert by_what["24 H800 + 24 H20 over 32 H800, 7B"] == pytest.approx(100 / 50)
    assert by_what["24 H800 + 24 H20 over 88 H20, 7B"] == pytest.approx(120 / 50)
    assert by_what["sync, % of a step on 8 H800 + 48 H20, 7B"] == pytest.approx(20)
    assert by_what["tokens a dollar, the bar of 56 GPUs over that of 24, 7B"] == pytest.approx(2.5 / 2.2)


def test_what_to_rent_by_hand(small: Figures) -> None:
    """An H800 is worth 10 tokens/s and an H20 5, at 5 and 2 dollars: H20 give more for the money."""
    solves = Solves()
    for ask in mix_asks(solves, small):
        kinds = [d.kind for d in ask.problem.cluster.devices]
        solves.remember(ask, outcome(10.0 * kinds.count("H800") + 5.0 * kinds.count("H20")))
    found = compare_mixes(solves, small)
    assert {r.model for r in found} == set(MODELS)
    # 120 dollars an hour: 24 H800 give 240; 8 + 40 (120 dollars) and 0 + 56 (112) give 280, the second for less.
    assert {(r.most, round(r.gain, 9)) for r in found} == {((0, 56), round(280 / 240, 9))}
    # As fast as 240: 0 + 48 for 96 dollars.
    assert {(r.least, round(r.saving, 9)) for r in found} == {((0, 48), 120 / 96)}


def test_without_a_simulator_there_is_no_section() -> None:
    assert list(section([])) == []
    rows = list(section([Simulated(what="a over b", paper=1.5, predicted=2.0, simulated=1.9)]))
    assert "| a over b | 1.50 | 2.00 | 1.90 | 0.950 |" in rows


def test_swept_inputs_reach_the_problem() -> None:
    assert BASE in sweep()
    assert len(set(sweep())) == len(sweep())
    p = areal_hex("7B", 8, 4, replace(BASE, response_mean=1000.0, prompts=64, eta=1, sheet="989/3.35", cap=32))
    assert [d.kind for d in p.cluster.devices] == ["H800"] * 8 + ["H20"] * 4
    assert (p.cluster.kinds["H800"].peak_flops, p.cluster.kinds["H800"].hbm_bytes_per_s) == SHEETS["989/3.35"]
    assert p.cluster.kinds["H20"].train_efficiency == 1.0, "nothing calibrated on the paper"
    assert (p.workload.response.mean_tokens, p.workload.prompts_per_step, p.workload.eta) == (1000, 64, 1)
    assert (p.capabilities.rollout_max_running, p.workload.update_mode) == (32, "pause")
    halves = areal_hex("7B", 4, 0, BASE, halves=True).overrides
    assert [o.role for o in halves] == ["train", "train", "rollout", "rollout"]


def test_hetrl_problems() -> None:
    p = hetrl("S2", "4B", "grpo", "async")
    assert (len(p.cluster.devices), p.workload.algorithm, p.workload.mode, p.workload.eta) == (64, "grpo", "async", 4)
    assert p.model.layers == 36
    assert len(hetrl("S1", "8B", "ppo", "sync", only="A100-40").cluster.devices) == 24
    read = Case(scenario="S1", model="8B", algorithm="grpo", mode="sync", reading="1024 prompts a step").problem()
    assert read.workload.samples_per_step == 8192


def test_a_plan_is_kept_while_the_planner_stays(tmp_path: Path) -> None:
    cache = tmp_path / "plans.json"
    ask = Ask(problem=areal_hex("1.5B", 2, 2, BASE))
    first = Solves(cache=cache)
    first.prepare([ask, ask])
    found = first.of(ask)
    assert found is not None
    assert sum(found.train.values()) + sum(found.rollout.values()) <= 4
    assert Solves(cache=cache).of(ask) == found
    cache.write_text(cache.read_text().replace(first.digest, "of another planner"))
    assert Solves(cache=cache)._known == {}


def test_one_device_s_rates_are_positive_and_h800_trains_faster() -> None:
    rates = {k: device_rate("1.5B", k, BASE, "train") for k in ("H800", "H20")}
    assert rates["H800"] is not None
    assert rates["H20"] is not None
    assert rates["H800"] > rates["H20"] > 0
    assert (device_rate("1.5B", "H20", BASE, "rollout") or 0) > 0


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ((1.6, 1.9), "inside"),
        ((1.0, 3.0), "around"),
        ((1.0, 1.8), "overlaps"),
        ((2.1, 3.0), "above"),
        ((1.0, 1.4), "below"),
    ],
)
def test_ranges_meet_or_not(ours: tuple[float, float], said: str) -> None:
    case = Case(scenario="S1", model="8B", algorithm="ppo", mode="sync")
    row = Row(
        what="sync, over verl", scenario="S1", paper=(1.5, 2.0), values=tuple((case, v) for v in ours),
        readings=(), hetrl=(), hex_over_hetrl=(), no_plan=0,
    )  # fmt: skip
    assert overlap(row.ours, row.paper) == said
    assert where(row) == f"hex {said}"
    assert row.ours == ours
    assert row.ratio == pytest.approx(sum(ours) / 2 / 3**0.5)


def test_markdown_and_pictures() -> None:
    assert table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]
    assert (number(None), number(1234.5, 0), pair((1.0, 1.004)), pair((1.0, 2.0))) == (
        "-",
        "1,234",
        "1.00",
        "1.00-2.00",
    )
    svg = drawn("t", "m", [Bar(label="a < b", low=1, middle=2, high=4, paper=(1.5, 1.5), mark=3)], "x")
    assert svg.startswith("<svg")
    assert "a &lt; b" in svg
    assert svg.count("<circle") == 1


needs_papers = pytest.mark.skipif(
    bool(missing(FOLDER)), reason=f"the papers' figures are not beside the checkout ({FOLDER.name})"
)


@needs_papers
def test_every_contradiction_is_confirmed_by_the_papers_own_figures() -> None:
    found = list(contradictions(read_figures(FOLDER)))
    assert [c.what for c in found if not c.holds] == []
    assert "13.54" in next(c.other for c in found if c.what == "unit of Figure 4")


@needs_papers
def test_the_design_s_own_figures_come_out() -> None:
    """The mix at $86.64 an hour, and the ratio with training on H800 only, that the design notes."""
    f = read_figures(FOLDER)
    assert mixes_at(f, 86.64) == [(8, 24)]
    only = [p for p in predictions(f) if "only H800 train" in p.what and p.section == "figure 3"]
    assert [round(p.value, 2) for p in only][:2] == [1.42, 1.38]
