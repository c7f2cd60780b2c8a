"""Toned text: cutting, padding, and text of the daemon made harmless."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hexctl.tui.view.text import Span, beside, clean, clip, line, pad, plain, rule, width_of, wrap

WORDS = st.text(max_size=30).map(clean)
LINES = st.lists(WORDS, max_size=5).map(lambda words: line(*words))


@given(st.text(max_size=60))
def test_cleaned_text_is_one_line_of_visible_cells(text: str) -> None:
    out = clean(text)
    assert len(out) == len(text)
    for ch in out:
        assert unicodedata.category(ch)[0] not in "CM", hex(ord(ch))
        assert cell_len(ch) in (1, 2)


def test_escapes_and_tricks_do_not_survive() -> None:
    assert clean("a\x1b[2Jb\x07") == "a?[2Jb?"
    assert clean("x\u200by\u202ez") == "x?y?z"
    assert clean("one\ntwo\tthree") == "one two three"
    assert clean("[bold]kept[/]") == "[bold]kept[/]"


@given(LINES, st.integers(0, 40))
def test_clip_never_exceeds_and_keeps_what_fits(spans: tuple[Span, ...], width: int) -> None:
    out = clip(spans, width)
    assert width_of(out) <= max(width, 0)
    if width_of(spans) <= width:
        assert plain(out) == plain(spans)
    elif width > 0:
        assert plain(out).endswith("…")


@given(LINES, st.integers(1, 60), st.sampled_from(["left", "right"]))
def test_pad_is_exact(spans: tuple[Span, ...], width: int, align: str) -> None:
    assert width_of(pad(spans, width, align)) == width  # type: ignore[arg-type]


@given(st.lists(LINES, max_size=4), st.lists(LINES, max_size=4))
def test_blocks_side_by_side_keep_every_row(left: list[tuple[Span, ...]], right: list[tuple[Span, ...]]) -> None:
    rows = beside(left, right, 12)
    assert len(rows) == max(len(left), len(right))
    for row, mine in zip(rows, left, strict=False):
        assert width_of(row) >= 14
        assert plain(row).startswith(plain(clip(mine, 12)))


@given(WORDS, st.integers(4, 120))
def test_rules_have_the_width_they_are_given(title: str, width: int) -> None:
    out = rule(title, width, line(Span("7")))
    assert width_of(out) <= width
    if cell_len(title) + 10 <= width:
        assert width_of(out) == width


@given(st.text(max_size=200), st.integers(2, 40))
def test_wrapped_lines_fit_and_lose_only_the_cut_ends_of_long_words(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(width_of(x) <= width for x in lines)
    words = clean(text).split()
    if all(cell_len(w) <= width for w in words):
        assert " ".join(plain(x) for x in lines).split() == words
