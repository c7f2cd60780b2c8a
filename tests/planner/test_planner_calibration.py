"""Measured tables: what goes out as text comes back equal, and what is wrong says where."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibration import (
    Calibration,
    CollectivePoint,
    CopyPoint,
    DecodePoint,
    EngineRate,
    GemmPoint,
    KindTables,
    LinkPoint,
    Provenance,
    TrainerRate,
    UpdateTime,
    decode,
    encode,
)
from planner.errors import InvalidInput
from planner.record import replace

ORIGIN = Provenance(source="test", how="simulated")
sizes, seconds = st.integers(1, 10**9), st.floats(1e-9, 1e6)
names = st.text(min_size=1, max_size=12)


@st.composite
def tables(draw: st.DrawFn) -> KindTables:
    many = {"max_size": 3}
    return KindTables(
        kind=draw(names),
        provenance=Provenance(
            source=draw(names), how=draw(st.sampled_from(["measured", "paced", "simulated"])), host=draw(st.text())
        ),
        gemm=tuple(
            draw(st.lists(st.builds(GemmPoint, m=sizes, n=sizes, k=sizes, dtype=names, seconds=seconds), **many))
        ),
        collectives=tuple(
            draw(
                st.lists(
                    st.builds(
                        CollectivePoint, op=st.just("all_reduce"), ranks=sizes, size_bytes=seconds, seconds=seconds
                    ),
                    **many,
                )
            )
        ),
        links=tuple(
            draw(
                st.lists(
                    st.builds(LinkPoint, path=st.just("peer"), size_bytes=seconds, bytes_per_s=seconds, to=names,
                              latency_s=st.none() | seconds),
                    **many,
                )
            )
        ),
        trainer=tuple(
            draw(
                st.lists(
                    st.builds(
                        TrainerRate, model=names, params=sizes, devices=sizes, sequence_tokens=sizes, micro_batch=sizes,
                        recompute=st.booleans(), tokens_per_s=seconds, checkpoint_s=st.none() | seconds,
                    ),
                    **many,
                )
            )
        ),
        updates=tuple(
            draw(
                st.lists(
                    st.builds(UpdateTime, path=st.sampled_from(["direct", "store"]), model=names, params=sizes,
                              swap_s=seconds),
                    **many,
                )
            )
        ),
    )  # fmt: skip


@given(st.lists(tables(), max_size=3, unique_by=lambda t: t.kind))
def test_text_comes_back_equal(kinds: list[KindTables]) -> None:
    calibration = Calibration(kinds=tuple(kinds))
    assert decode(encode(calibration)) == calibration


def _text(**changes: object) -> str:
    kind = {
        "kind": "H100",
        "provenance": {"source": "x", "how": "measured"},
        "gemm": {"columns": ["m", "n", "k", "dtype", "seconds"], "rows": [[1, 2, 3, "bf16", 1e-5]]},
        **changes,
    }
    return json.dumps({"format": "hexctl-calibration", "version": 1, "kinds": [kind]})


def test_columns_may_come_in_any_order_and_defaults_be_absent() -> None:
    rows = {"columns": ["seconds", "size_bytes", "ranks", "op"], "rows": [[0.5, 100, 2, "all_gather"]]}
    found = decode(_text(collectives=rows)).of("H100")
    assert found is not None
    assert found.collectives == (CollectivePoint(op="all_gather", ranks=2, size_bytes=100.0, seconds=0.5),)
    assert found.gemm == (GemmPoint(m=1, n=2, k=3, dtype="bf16", seconds=1e-5),)


def test_a_file_that_tells_neither_checkpoints_nor_updates_is_read_as_before() -> None:
    columns = ["model", "params", "devices", "sequence_tokens", "micro_batch", "recompute", "tokens_per_s"]
    rows = {"columns": columns, "rows": [["m", 9, 1, 64, 8, False, 100.0]]}
    found = decode(_text(trainer=rows)).of("H100")
    assert found is not None
    assert found.trainer[0].checkpoint_s is None
    assert found.updates == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"format": "other"}', "hexctl-calibration"),
        (_text(kind=3), r"kinds\[0\].kind"),
        (_text(gem={}), "'gem'"),
        (_text(gemm={"columns": ["m"], "rows": [[1, 2]]}), r"gemm.rows\[0\].*1 values"),
        (_text(gemm={"columns": ["m"], "rows": [[1]]}), "n is missing"),
        (_text(gemm={"columns": ["m", "n", "k", "dtype", "seconds"], "rows": [[1, 2, 3, "bf16", 0]]}), "positive"),
        (_text(gemm={"columns": ["m", "n", "k", "dtype", "seconds"], "rows": [[1.5, 2, 3, "bf16", 1]]}), "int"),
        (_text(provenance={"source": "x"}), "how is missing"),
        (_text(provenance={"source": "x", "how": "guessed"}), "measured, paced, simulated"),
        (_text(provenance={"source": "", "how": "measured"}), "source is empty"),
    ],
)
def test_what_is_wrong_says_where(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        decode(text, where="mine.json")
    assert "mine.json" in str(caught.value)


def test_one_table_a_kind_and_newer_tables_win() -> None:
    old = KindTables(kind="A", provenance=ORIGIN)
    new = KindTables(kind="A", provenance=Provenance(source="again", how="measured"))
    other = KindTables(kind="B", provenance=ORIGIN)
    with pytest.raises(InvalidInput, match="two tables"):
        Calibration(kinds=(old, new))
    assert Calibration(kinds=(old, other)).merged(Calibration(kinds=(new,))).of("A") == new
    assert Calibration(kinds=(old, other)).merged(Calibration()).of("B") == other
    assert Calibration().of("A") is None


def test_kv_bytes_of_a_decode_point_by_hand() -> None:
    point = DecodePoint(batch=2, context=100, heads=8, kv_heads=4, head_dim=64, seconds=1.0)
    assert point.kv_bytes == 2 * 2 * 100 * 4 * 64 * 2
    with pytest.raises(InvalidInput, match="tokens_per_s"):
        EngineRate(phase="decode", model="m", params=1, tp=1, running=1, context=1, tokens_per_s=float("nan"))


def test_a_newer_measurement_of_the_same_card_keeps_what_it_did_not_measure() -> None:
    def rate(model: str, tokens_per_s: float, engine: str = "torch") -> EngineRate:
        return EngineRate(
            phase="decode", model=model, params=1, tp=1, running=1, context=1, tokens_per_s=tokens_per_s, engine=engine
        )

    here = Provenance(source="hexctl profile", how="measured", device="NVIDIA H200", host="a", torch="2.11")

    def update(model: str, swap_s: float, engine: str = "torch") -> UpdateTime:
        return UpdateTime(path="direct", model=model, params=1, swap_s=swap_s, engine=engine)

    copy = CopyPoint(size_bytes=1e6, bytes_per_s=1e12)
    old = KindTables(
        kind="H200",
        provenance=here,
        hbm_copy=(copy,),
        engine=(rate("reference-0.6b", 1.0), rate("own", 2.0), rate("own", 3.0, "vllm")),
        updates=(update("own", 0.1), update("own", 0.2, "vllm")),
    )
    new = KindTables(
        kind="H200",
        provenance=replace(here, measured_on="2026-01-02"),
        engine=(rate("own", 4.0),),
        updates=(update("own", 0.3),),
    )
    both = new.beside(old)
    assert both.hbm_copy == (copy,)
    assert [(r.model, r.engine, r.tokens_per_s) for r in both.engine] == [
        ("own", "torch", 4.0), ("reference-0.6b", "torch", 1.0), ("own", "vllm", 3.0)
    ]  # fmt: skip
    assert both.updates == (update("own", 0.3), update("own", 0.2, "vllm"))
    elsewhere = replace(old, provenance=replace(here, torch="2.12"))
    assert new.beside(elsewhere) == new
