"""One cell of the contest, a model at a link rate, as it is kept in a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.observe.summary import deciles

VERSION = 1


class CellError(ValueError):
    """A file that is no cell, or one of another contest."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One contestant in one cell.

    Args:
        turns_s: the mean step of each of its turns, in order: entry i of all contestants was measured in the same round.
            Those who were not close to ``auto`` have fewer.
        sent_bytes: by one host in one step, as its interface counts.
        predicted_s: the step that the planner predicted before the turns; None where it makes no prediction.
    """

    contestant: str
    turns_s: tuple[float, ...]
    sent_bytes: float
    predicted_s: float | None = None

    @property
    def median_s(self) -> float:
        """Of the turns."""
        return statistics.median(self.turns_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """First and last decile of the turns."""
        low_s, high_s = deciles(list(self.turns_s))
        return (self.median_s if low_s is None else low_s, self.median_s if high_s is None else high_s)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All contestants at one rate on one model.

    Args:
        plans: of ``auto``, in order: ``round`` (0: the warm-up, before anything was timed), ``compress``, ``fuse``,
            ``step_s``, ``dense_s``, ``floor_s``, ``candidates`` and ``facts``.
        facts: where and when it was measured.
    """

    model: str
    rate: str
    hosts: int
    batch: int
    seq: int
    parameters: int
    steps_per_turn: int
    duration_s: float
    scores: tuple[Score, ...]
    plans: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, str]

    def score(self, contestant: str) -> Score | None:
        """Of one contestant; None if it did not take part."""
        return next((score for score in self.scores if score.contestant == contestant), None)

    def save(self, path: Path) -> None:
        """Write as JSON; a file under this name is always whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Cell:
        """Read what :meth:`save` wrote.

        Raises:
            CellError: it is something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("version") != VERSION:
                raise ValueError(f"not of version {VERSION}")
            scores = (Score(**{**score, "turns_s": tuple(score["turns_s"])}) for score in values.pop("scores"))
            return cls(**{**values, "scores": tuple(scores), "plans": tuple(values["plans"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CellError(f"{path} is no cell of a contest ({error}); remove it, or choose another --out") from error


def load_cells(directory: Path) -> list[Cell]:
    """All cells that were kept in a directory."""
    return [Cell.load(path) for path in sorted(directory.glob("*.json"))]
