"""Pictures of the dashboard, compared exactly. `--snapshot-update` (make snap) writes them anew."""

import tempfile
from pathlib import Path

import pytest

from planner.record import replace
from runtime.api.wire import Snapshot
from tests.tui.samples import FakeSource, app_on, paced_snapshot, sample_snapshot, step_history

HERE = Path(__file__).resolve().parent
README_PICTURE = HERE.parent.parent / "docs" / "images" / "dashboard.svg"
PICTURES: dict[Path, tuple[Snapshot, tuple[int, int], tuple[str, ...]]] = {
    README_PICTURE: (sample_snapshot(), (140, 45), ()),
    HERE / "pictures" / "fleet-80x24.svg": (sample_snapshot(), (80, 24), ()),
    HERE / "pictures" / "plan-140x45.svg": (sample_snapshot(), (140, 45), ("3",)),
    HERE / "pictures" / "flow-140x45.svg": (sample_snapshot(), (140, 45), ("2",)),
    HERE / "pictures" / "drain-80x24.svg": (sample_snapshot(), (80, 24), ("j", "D")),
    HERE / "pictures" / "paced-80x24.svg": (paced_snapshot(), (80, 24), ()),
}


@pytest.mark.parametrize("path", PICTURES, ids=lambda p: p.stem)
async def test_picture(path: Path, request: pytest.FixtureRequest) -> None:
    snapshot, size, keys = PICTURES[path]
    app = app_on(FakeSource(replace(snapshot, seq=0)))
    async with app.run_test(size=size) as pilot:
        step_history(app, snapshot)
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        drawn = app.export_screenshot(title="hexctl").replace("<text ", '<text xml:space="preserve" ') + "\n"
    if request.config.getoption("update_snapshots", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    assert path.is_file(), f"{path.name} is missing: make snap"
    assert path.read_text(encoding="utf-8") == drawn, f"{path.name} is out of date: look at it, then make snap"


def test_the_picture_is_of_this_program_and_holds_no_path() -> None:
    text = README_PICTURE.read_text(encoding="utf-8")
    for word in ("WAITS", "STALE", "simulated", "throttled", "LOST"):
        assert word in text
    assert not any(str(folder) in text for folder in (Path.home(), HERE.parent.parent, tempfile.gettempdir()))
