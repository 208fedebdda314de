"""The site builds without a warning, from pages that are as the code says, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire.cli.compressors import as_markdown

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="pip install 'thinwire[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_builds_strictly(site: Path) -> None:
    """A broken link or anchor, a page that is not in the navigation, a name that does not exist: all fail."""
    assert (site / "index.html").exists()
    assert "observers" in (site / "reference/api/thinwire/index.html").read_text(encoding="utf-8")


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    loading = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+rel=\"?(?:stylesheet|preconnect)[^>]+https?:"
    )
    assert not [page for page in site.rglob("*.html") if loading.search(page.read_text(encoding="utf-8"))]


def test_the_page_of_the_command_line_is_current() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))["page"]()
    assert (REFERENCE / "cli.md").read_text(encoding="utf-8") == made, "run: make docs"


def test_the_page_of_the_compressors_is_current() -> None:
    made = as_markdown(thinwire.available())
    assert (REFERENCE / "compressors.md").read_text(encoding="utf-8") == made, "run: make docs"
