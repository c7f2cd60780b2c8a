"""Positions of keys in TOML text, against trees written by our own emitter and a page of awkward spellings."""

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runtime.config.emit import to_toml
from runtime.config.locate import key_lines

KEYS = st.text("ab.-_\"' \\é#=[]{}", min_size=1, max_size=5)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)
TREES = st.dictionaries(KEYS, VALUES, max_size=5)


@given(TREES)
def test_the_emitter_writes_what_reads_back_as_the_same_tree(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


@given(TREES)
def test_every_key_is_found_on_a_line_that_spells_its_value(tree: dict[str, Any]) -> None:
    text = to_toml(tree)
    lines = text.split("\n")
    found = key_lines(text)

    def check(value: Any, path: tuple[str | int, ...]) -> None:
        if path:
            assert 1 <= found[path] <= len(lines)
        if isinstance(value, dict):
            for k, v in value.items():
                check(v, (*path, k))
        elif isinstance(value, list):
            for i, v in enumerate(value):
                check(v, (*path, i))
        elif isinstance(value, int) and not isinstance(value, bool):
            assert str(value) in lines[found[path] - 1]

    check(tree, ())


AWKWARD = '''\
# [no.table]
top = 1 # = 2
"quoted \\u0041" = 2
a.b . 'c d' = 3

[ x . y ] # comment
s = """
z = 1
[fake]
\\""" still inside"""
l = \'\'\'
k = 1\'\'\'
after = "x # y"
list = [
  1, # one
  [2,
   3],
  { p = 4, q.r = [5] },
]
[[t]]
n = 1
[[t]]
n = 2
[t.sub]
m = 3
[[t.sub.deep]]
v = inf
quotes = """ends in two quotes"""""
last = 1979-05-27T07:32:00Z'''


def test_awkward_spellings() -> None:
    assert tomllib.loads(AWKWARD)["x"]["y"]["s"] == 'z = 1\n[fake]\n""" still inside'  # what the table below relies on
    expected = {
        ("top",): 2, ("quoted A",): 3, ("a",): 4, ("a", "b"): 4, ("a", "b", "c d"): 4,
        ("x",): 6, ("x", "y"): 6, ("x", "y", "s"): 7, ("x", "y", "l"): 11, ("x", "y", "after"): 13,
        ("x", "y", "list"): 14, ("x", "y", "list", 0): 15, ("x", "y", "list", 1): 16, ("x", "y", "list", 1, 0): 16,
        ("x", "y", "list", 1, 1): 17, ("x", "y", "list", 2): 18, ("x", "y", "list", 2, "p"): 18,
        ("x", "y", "list", 2, "q"): 18, ("x", "y", "list", 2, "q", "r"): 18, ("x", "y", "list", 2, "q", "r", 0): 18,
        ("t",): 20, ("t", 0): 20, ("t", 0, "n"): 21, ("t", 1): 22, ("t", 1, "n"): 23,
        ("t", 1, "sub"): 24, ("t", 1, "sub", "m"): 25, ("t", 1, "sub", "deep"): 26, ("t", 1, "sub", "deep", 0): 26,
        ("t", 1, "sub", "deep", 0, "v"): 27, ("t", 1, "sub", "deep", 0, "quotes"): 28,
        ("t", 1, "sub", "deep", 0, "last"): 29,
    }  # fmt: skip
    assert dict(key_lines(AWKWARD)) == expected
