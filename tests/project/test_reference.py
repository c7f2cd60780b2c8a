"""docs/reference is generated; this compares it with what the code says now."""

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_reference_is_what_the_code_says(page: str) -> None:
    assert (REFERENCE / page).read_text() == PAGES[page](), "run `make docs`"
