"""The house keeps its shape: file sizes, clean data folders, documents that tell the truth."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CEILING_LINES = 500
SOURCES = ("planner", "runtime", "hexctl")


def _sources() -> list[Path]:
    return [p for top in SOURCES for p in sorted((ROOT / top).rglob("*.py"))]


def test_no_file_is_over_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = sorted(((len(p.read_text().splitlines()), p.relative_to(ROOT)) for p in _sources()), reverse=True)
    with capsys.disabled():
        print("\nlargest files:", ", ".join(f"{path} {lines}" for lines, path in sizes[:8]))
    assert [f"{path}: {lines} lines" for lines, path in sizes if lines > CEILING_LINES] == []


def test_no_vague_module_names() -> None:
    vague = {"utils.py", "helpers.py", "misc.py", "common.py"}
    assert [p for p in _sources() if p.name in vague] == []


def test_nothing_in_the_product_knows_the_machine_it_was_made_on() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: the list of tracked files is not known")
    # Written in two parts so that this file does not find itself.
    places = re.compile("(/wor" + "k/|/roo" + "t/|/hom" + "e/[a-z])")
    bad = []
    for name in tracked:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".json", ".yaml", ".txt", ""}
            and path.is_file()
            and places.search(path.read_text(errors="ignore"))
        ):
            bad.append(name)
    assert bad == []


@pytest.mark.parametrize("module", ["planner", "runtime.api.wire", "runtime.config.schema", "hexctl.cli.main"])
def test_the_light_core_imports_neither_torch_nor_ray_nor_textual(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'textual', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.strip() == "[]"


def test_internal_links_of_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_the_readme_names_only_words_the_makefile_has() -> None:
    words = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    used = {w for page in pages for w in re.findall(r"`make ([a-z]+)", page.read_text())}
    used |= {w for page in pages for w in re.findall(r"^make ([a-z]+)", page.read_text(), re.M)}
    assert used, "the README shows no command"
    assert used <= words
