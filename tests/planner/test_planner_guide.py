"""The library example of docs/guides/planning.md runs and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"


def test_the_example_prints_what_the_page_shows() -> None:
    found = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, "the page has no example"
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(found[1], str(PAGE), "exec"), {"__name__": "guide"})
    assert told.getvalue() == found[2]
