"""Results on disk: one JSON line per finished run, so that a stopped benchmark goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import Run, recipe

Result = dict[str, Any]


def read(path: Path) -> dict[str, Result]:
    """Finished runs by key; lines that were cut off, and results of another recipe than today's, are left out."""
    results: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get("recipe") == recipe(TASKS[result["task"]]):
            results[Run(**{field.name: result[field.name] for field in fields(Run)}).key] = result
    return results


def append(path: Path, result: Result) -> None:
    """Add one finished run."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")


class Results:
    """Finished runs, to be asked about."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)

    def find(self, **wanted: Any) -> list[Result]:
        """Runs with these settings; what is not given must have its default value."""
        settings = {field.name: wanted.get(field.name, field.default) for field in fields(Run) if field.name != "steps"}
        found = [r for r in self.all if all(r[name] == value for name, value in settings.items() if value is not ANY)]
        return sorted(found, key=lambda r: r["seed"])

    def loss(self, **wanted: Any) -> float | None:
        """The last evaluation loss of one run; None: it is not there."""
        found = self.find(**wanted)
        return float(found[0]["loss"]) if found else None

    def tasks(self) -> list[str]:
        """Names of the tasks, in the order in which they came."""
        return list(dict.fromkeys(result["task"] for result in self.all))


ANY = object()
