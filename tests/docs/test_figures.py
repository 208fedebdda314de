"""Figures in README and docs are those of the files under ``benchmarks/results``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import figure, results

ROOT = Path(__file__).parents[2]
# Pages that state measurements; constants of the code may stand in the others.
MEASURED = [page for page in results.pages() if page.name in ("README.md", "log.md") or page.parent.name == "results"]


@pytest.mark.parametrize("page", results.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_are_those_of_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results.filled(text) == text, "run: python -m benchmarks.results"


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_in_prose_are_in_a_file(page: Path) -> None:
    assert not results.strays(page.read_text(encoding="utf-8"))


def test_the_picture_is_that_of_the_file() -> None:
    assert figure.PATH.read_text(encoding="utf-8") == figure.picture(), "run: python -m benchmarks.figure"


@pytest.mark.parametrize("study", results.studies())
def test_every_study_says_how_it_was_made_and_is_shown(study: str) -> None:
    found = json.loads((results.FOLDER / f"{study}.json").read_text(encoding="utf-8"))
    assert all(found[key] for key in ("commands", "date", "machine", "setting", "tables"))
    assert found["study"] == study
    for name, table in found["tables"].items():
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), name
    shown = "".join(page.read_text(encoding="utf-8") for page in results.pages())
    missing = [name for name in results.load(study)["tables"] if f"<!-- results: {study}/{name} -->" not in shown]
    assert not missing


def test_a_figure_that_no_file_holds_is_found() -> None:
    assert results.strays(
        "<!-- figures: contest -->\nIt took 0.37 of the time and 12.34 s, `0.5` in code, 99 % more."
    ) == [
        "12.34",
        "99",
    ]


def test_a_table_that_was_edited_is_found() -> None:
    page = "<!-- results: demo/table -->\n| a |\n<!-- end results -->\n"
    assert "PyTorch DDP" in results.filled(page)
    assert results.filled(results.filled(page)) == results.filled(page)
