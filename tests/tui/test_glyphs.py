"""Glyphs: one cell each, and nothing but ASCII where only ASCII will do."""

import ast
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import hexctl.tui
from hexctl.tui.view.glyphs import ASCII_OF, to_ascii
from hexctl.tui.view.text import clean

SOURCES = sorted(Path(hexctl.tui.__file__).parent.rglob("*.py"))


def _literals(path: Path) -> str:
    """All text of a module's strings, docstrings excepted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docs.add(id(node.body[0].value))  # type: ignore[attr-defined]
    return "".join(
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
    )  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_glyph_in_the_sources_is_in_the_table(path: Path) -> None:
    strange = {ch for ch in _literals(path) if not ch.isascii()} - set(ASCII_OF)
    assert not strange, f"{path.name} draws {strange} without an ASCII stand-in"


@pytest.mark.parametrize("glyph", sorted(ASCII_OF), ids=lambda g: f"U+{ord(g):04X}")
def test_every_glyph_takes_one_cell(glyph: str) -> None:
    assert len(glyph) == 1
    assert cell_len(glyph) == 1
    assert unicodedata.east_asian_width(glyph) not in ("W", "F")
    assert unicodedata.category(glyph)[0] in "SPL"  # no marks, controls or formats that combine
    assert len(ASCII_OF[glyph]) == 1
    assert ASCII_OF[glyph].isascii()


def test_wcwidth_agrees() -> None:
    wcwidth = pytest.importorskip("wcwidth", reason="wcwidth is not installed here; rich and unicodedata were asked")
    assert {g: wcwidth.wcwidth(g) for g in ASCII_OF} == dict.fromkeys(ASCII_OF, 1)


@given(st.text(max_size=40).map(clean))
def test_ascii_keeps_the_cells(text: str) -> None:
    out = to_ascii(text)
    assert out.isascii()
    assert len(out) == cell_len(text)
