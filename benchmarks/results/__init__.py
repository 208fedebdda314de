"""Measured figures as files, and the tables that README and docs show of them.

One JSON file per study, with the commands that repeat it, the date and the machine; ``contest-steps.csv`` holds the step
times of the contest. Pages name what they show::

    <!-- results: contest/auto -->
    (a table, written by ``python -m benchmarks.results``)
    <!-- end results -->

``contest`` alone stands for how the study was made. A figure in prose must occur in a study that its page names in such a
comment, or in ``<!-- figures: contest, demo -->``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MARKED = re.compile(r"(<!-- results: (?P<what>[\w/-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)
NAMED = re.compile(r"<!-- (?:results|figures): ([\w/, -]+?) -->")
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.-])\d+(?:\.\d+| %)(?: %)?(?![\w.]*\d)")
MODELS = {"cnn": "cnn", "lstm": "lstm", "small": "small"}


def pages() -> list[Path]:
    """Every page that may show results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load(study: str) -> dict[str, Any]:
    """A study with its tables."""
    path = FOLDER / f"{study}.json"
    if not path.exists():
        raise ValueError(f"there is no study {study!r}; there are {', '.join(studies())}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if study == "contest":
        found["tables"] |= {f"steps-{model}": _step_table(model) for model in MODELS}
    return found


def studies() -> list[str]:
    """The names of all studies; other files beside them have no tables for pages."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if '"tables"' in path.read_text(encoding="utf-8"))


def contest_steps() -> list[dict[str, str]]:
    """Rows of the contest: model, rate, contestant, median_s, decile1_s, decile9_s, predicted_s."""
    with (FOLDER / "contest-steps.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def render(what: str) -> str:
    """What stands between the markers for ``study`` or ``study/table``."""
    study, _, table = what.partition("/")
    found = load(study)
    if not table:
        return _about(found)
    if table not in found["tables"]:
        raise ValueError(f"{study} has no table {table!r}; it has {', '.join(found['tables'])}")
    return _markdown(found["tables"][table])


def filled(text: str) -> str:
    """A page with everything between markers as the files say."""
    return MARKED.sub(lambda match: f"{match[1]}\n{render(match['what'])}\n{match[3]}", text)


def strays(text: str) -> list[str]:
    """Figures in the prose of a page (decimals and percentages) that none of the studies it names holds."""
    named = {one.strip().split("/")[0] for names in NAMED.findall(text) for one in names.split(",")}
    known = {figure for study in named for figure in _figures(json.dumps(load(study), ensure_ascii=False))}
    prose = CODE.sub("", MARKED.sub("", text))
    return [figure for figure in _figures(prose) if figure not in known]


def _figures(text: str) -> Iterator[str]:
    for match in FIGURE.finditer(text.replace("\u202f", " ")):
        yield match[0].removesuffix(" %")


def _about(found: dict[str, Any]) -> str:
    commands = "\n".join(found["commands"])
    return f"{found['setting']}. Measured {found['date']} on {found['machine']}.\n\n```console\n{commands}\n```\n"


def _markdown(table: dict[str, Any]) -> str:
    columns = table["columns"]
    align = table.get("align", "l" * len(columns))
    rule = ["---:" if one == "r" else "---" for one in align]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in (columns, rule, *table["rows"]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _step_table(model: str) -> dict[str, Any]:
    rows = [row for row in contest_steps() if row["model"] == model]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    cells = {(row["contestant"], row["rate"]): _step_cell(row) for row in rows}
    return {
        "columns": ["contestant", *rates],
        "rows": [[contestant, *(cells[contestant, rate] for rate in rates)] for contestant in contestants],
    }


def _step_cell(row: dict[str, str]) -> str:
    predicted = f"; {row['predicted_s']}" if row["predicted_s"] else ""
    return f"{row['median_s']} ({row['decile1_s']}-{row['decile9_s']}{predicted})"
