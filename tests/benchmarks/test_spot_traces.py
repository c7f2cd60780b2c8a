"""Writing the table of spot traces into the page that explains it."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spot_traces import with_table

PROSE = st.text(st.sampled_from("ab \n"), max_size=20).map(lambda s: s + "\n")
ROWS = st.lists(st.text(st.sampled_from("xy |"), max_size=8).map(lambda s: f"|{s}|\n"), min_size=1, max_size=4).map(
    "".join
)


@given(before=PROSE, old=ROWS, after=PROSE, new=ROWS)
def test_a_page_keeps_its_words_and_gets_the_new_table(before: str, old: str, after: str, new: str) -> None:
    assert with_table(before + old + after, new) == before + new + after
    assert with_table(before, new) == before + new
