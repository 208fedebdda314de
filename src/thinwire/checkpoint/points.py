"""Which point to restore: the newest that every rank can load, found without a rank acting on what others do not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thinwire.checkpoint.ranks import Ranks
from thinwire.checkpoint.scan import Line

RESIDUALS = "residuals"  # in a manifest's info: the wire held state that no log rebuilds


def agree(lines: Iterator[Line], ranks: Ranks, *, step: int | None, exact: bool) -> tuple[Line, int] | None:
    """This rank's line, and how many of its records lead to the point agreed on; None where there is none.

    Older checkpoints are verified only while no common point is found: usually one.

    Args:
        step: the point wanted; default: the newest.
        exact: points of the log only where replay gives back everything.
    """
    mine, exhausted = list[Line](), False
    while True:
        line = next(lines, None)
        exhausted = line is None
        if line is not None:
            mine.append(line)
        offers = ranks.gather({"points": [_offer(one, step, exact) for one in mine], "exhausted": exhausted})
        chain = _newest_common(offers)
        if chain is not None:
            found = next(one for one in mine if chain in one.chains)
            return found, found.chains.index(chain)
        if all(offer["exhausted"] for offer in offers):
            return None


def _offer(line: Line, step: int | None, exact: bool) -> list[list[Any]]:
    """(step, chain) of every point on a line that may be used."""
    records = () if exact and line.manifest.info.get("wire") == RESIDUALS else line.records
    points = [[line.manifest.step, line.manifest.chain], *([record.step, record.after] for record in records)]
    return [point for point in points if step is None or point[0] == step]


def _newest_common(offers: list[dict[str, Any]]) -> str | None:
    offered = [{tuple(point) for line in offer["points"] for point in line} for offer in offers]
    common = set.intersection(*offered)
    return max(common)[1] if common else None
