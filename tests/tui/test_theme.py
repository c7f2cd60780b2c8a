"""Themes are data: each that ships is whole, and a broken one is told whole."""

from pathlib import Path

import pytest

from hexctl.data import data_folder
from hexctl.tui.theme import choose_theme, load_theme, read_theme, theme_names
from hexctl.tui.view.text import TONES
from runtime.errors import ConfigError


def test_three_themes_ship() -> None:
    assert set(theme_names()) >= {"dark", "light", "no-colour"}


@pytest.mark.parametrize("name", theme_names())
def test_every_theme_is_whole(name: str) -> None:
    theme = load_theme(name)
    assert set(theme.styles) == set(TONES)
    assert theme.textual().name == name
    if not theme.colour:
        assert all(s.color is None and s.bgcolor is None for s in theme.styles.values())


@pytest.mark.parametrize("name", theme_names())
def test_faults_and_warnings_do_not_look_like_text(name: str) -> None:
    styles = load_theme(name).styles
    for tone in ("fault", "warn", "outdated", "faint"):
        assert styles[tone] != styles["text"], tone  # type: ignore[index]
    assert styles["fault"] != styles["warn"]
    assert str(styles["cursor"])


def _contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    def luminance(rgb: tuple[int, int, int]) -> float:
        parts = [c / 255 for c in rgb]
        r, g, bl = ((c / 12.92) if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * bl

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", [n for n in theme_names() if load_theme(n).colour])
def test_words_can_be_read(name: str) -> None:
    theme = load_theme(name)
    ground = theme.chrome["background"]
    rgb = lambda text: tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))  # noqa: E731
    for tone in ("text", "strong", "label", "train", "rollout", "warn", "fault", "good", "accent", "dim"):
        colour = theme.styles[tone].color  # type: ignore[index]
        assert colour is not None
        assert colour.triplet is not None
        assert _contrast(tuple(colour.triplet), rgb(ground)) >= 4.5, tone


def test_a_broken_theme_is_told_with_all_its_faults(tmp_path: Path) -> None:
    source = (data_folder("themes") / "dark.toml").read_text(encoding="utf-8")
    broken = (
        source.replace('text = "#c8ccd8"', 'txet = "#c8ccd8"')
        .replace("colour = true", 'colour = "yes"')
        .replace('"#f7556f"', '"reddish"')
    )
    path = tmp_path / "mine.toml"
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_theme(path)
    told = str(caught.value)
    for word in (
        "mine.toml",
        "tones.text is missing",
        "tones.txet is unknown",
        "colour must be true or false",
        "chrome.error is not a colour",
    ):
        assert word in told
    path.write_text("not = [toml", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        read_theme(path)


def test_choice_of_theme() -> None:
    assert choose_theme(None, {}).name == "dark"
    assert choose_theme("light", {"NO_COLOR": "1"}).name == "light"
    assert choose_theme(None, {"NO_COLOR": "1"}).name == "no-colour"
    assert choose_theme(None, {"NO_COLOR": ""}).name == "dark"
    with pytest.raises(ConfigError, match="dark or light or no-colour"):
        choose_theme("solar", {})
