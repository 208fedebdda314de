"""A plan: what to use, what it is predicted to do, and why everything else was not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Literal

from thinwire.comm.trace import Span
from thinwire.core import ConfigError
from thinwire.core.schema import NonFinite, from_json, load_json, save_json, to_json

_REMEDY = "make it again with thinwire plan --json"

Quality = Literal["exact", "safe", "fast"]


def now() -> str:
    """The date as probes and plans carry it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One compressor with its best fusion.

    Args:
        relative_error: ‖g - C(g)‖² / ‖g‖².
        verdict: ``chosen``, or why it was not.
    """

    compress: str
    fuse: str
    step_s: float
    wire_bytes: int = 0
    memory_bytes: int = 0
    messages: int = 0
    relative_error: NonFinite = 0.0  # of gradients that may not be finite themselves
    allowed: bool = True
    verdict: str = "chosen"

    def __post_init__(self) -> None:
        _check_positive(self, "step_s")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The outcome of ``choose``; ``attach`` takes ``compress`` and ``fuse`` as they are.

    Args:
        step_s: predicted; ``floor_s`` without communication, ``dense_s`` with plain averaging at its best fusion.
        candidates: everything that was priced, fastest first.
        reasons: sentences.
        spans: the predicted step.
        sweep: for each link rate (bit/s), the predicted step of each compressor.
    """

    VERSION: ClassVar[int] = 1

    compress: str
    fuse: str
    quality: Quality
    world_size: int
    step_s: float
    floor_s: float
    dense_s: float
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    roofline: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    sweep: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        _check_positive(self, "world_size", "step_s", "floor_s", "dense_s")

    @property
    def speedup(self) -> float:
        """Predicted, over dense."""
        return self.dense_s / self.step_s

    def changed_to(self, chosen: Candidate, reason: str, candidates: Sequence[Candidate]) -> Plan:
        """Another candidate, for a reason that is added; the predicted step is no longer known in detail."""
        return replace(
            self,
            compress=chosen.compress,
            fuse=chosen.fuse,
            step_s=chosen.step_s,
            reasons=(*self.reasons, reason),
            candidates=tuple(candidates),
            spans=(),
            date=now(),
        )

    def explain(self) -> str:
        """The plan as text: what and why, then every candidate."""
        head = f"{self.compress}, fuse={self.fuse}: {_figures(self)}"
        reasons = (f"  {reason}" for reason in self.reasons)
        title = f"{self.world_size} ranks, quality={self.quality!r}"
        return "\n".join([head, *reasons, "", title, *_table(self), ""])

    def to_json(self) -> dict[str, Any]:
        """Plain values with a version."""
        plain: dict[str, Any] = to_json(self)
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """What ``to_json`` described.

        Raises:
            ConfigError: written by another version, or no plan at all.
        """
        return from_json(cls, values, what="plan", remedy=_REMEDY)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read what ``save`` wrote."""
        return cls.from_json(load_json(path, what="plan", remedy=_REMEDY))


def _check_positive(one: object, *names: str) -> None:
    for name in names:
        if not getattr(one, name) > 0:
            raise ConfigError(f"{name} is {getattr(one, name)}; expected more than 0")


def _figures(plan: Plan) -> str:
    floor = f"{plan.step_s / plan.floor_s:.2f} × the floor ({1e3 * plan.floor_s:.1f} ms)"
    faster = f", {plan.speedup:.2f} × faster than dense ({1e3 * plan.dense_s:.1f} ms)"
    return f"{1e3 * plan.step_s:.1f} ms predicted, {floor}" + ("" if plan.compress == "dense" else faster)


def _table(plan: Plan) -> list[str]:
    """One line per candidate: names to the left, figures to the right of their columns; the chosen one is marked."""
    headings = ["compress", "fuse", "step ms", "× floor", "× dense", "MB sent", "error", "verdict"]
    rows = [headings, *(_cells(plan, one) for one in plan.candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = ["  ", *("> " if one.compress == plan.compress else "  " for one in plan.candidates)]
    return [mark + _line(row, widths) for mark, row in zip(marks, rows, strict=True)]


def _line(cells: list[str], widths: list[int]) -> str:
    names = (cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True))
    figures = (cell.rjust(width) for cell, width in zip(cells[2:-1], widths[2:-1], strict=True))
    return "  ".join((*names, *figures, cells[-1]))


def _cells(plan: Plan, one: Candidate) -> list[str]:
    return [
        one.compress,
        one.fuse,
        f"{1e3 * one.step_s:.0f}",
        f"{one.step_s / plan.floor_s:.2f}",
        f"{plan.dense_s / one.step_s:.2f}",
        f"{one.wire_bytes / 1e6:.2f}",
        f"{one.relative_error:.1e}",
        one.verdict,
    ]
