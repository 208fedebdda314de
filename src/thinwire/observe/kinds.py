"""The kinds of events and their fields: one class each. Fields with a default may be missing, others are passed over.

Kinds that are not here are not checked: ``lab``, for one, has ``sent_bytes`` per host over the whole run, from the interface
counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from thinwire.comm.trace import Span
from thinwire.core.schema import NonFinite


@dataclass(frozen=True)
class Head:
    """What every event has."""

    OPEN: ClassVar[bool] = True

    v: int
    kind: str


@dataclass(frozen=True)
class _Settings:
    OPEN: ClassVar[bool] = True

    compress: str = ""
    network: str = ""
    workload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run(Head):
    label: str
    mode: str  # "floor", "ddp" or "thinwire", for example
    rank: int
    world_size: int
    started_at: str = ""
    settings: _Settings = _Settings()
    versions: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0
    sent_bytes_from: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class _Step(Head):
    """Of this step alone, except ``elapsed_s``; all but the first three come from thinwire."""

    step: int
    step_s: float
    elapsed_s: float
    loss: NonFinite = 0.0
    sent_bytes: float = 0.0
    wire_bytes: float = 0.0
    wait_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class _Evaluation(Head):
    step: int
    elapsed_s: float
    loss: NonFinite


@dataclass(frozen=True)
class _Trace(Head):
    """Times count from the first span."""

    step: int
    rank: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Plan(Head):
    """A plan of ``compress="auto"``; all times are predicted."""

    step: int  # the first under the plan
    compress: str
    fuse: str
    step_s: float
    dense_s: float
    floor_s: float
    explanation: str


@dataclass(frozen=True)
class _Ledger(Head):
    """Errors of the mean gradient relative to its square, every 50 steps with ``compress="auto"``."""

    step: int
    noise: NonFinite
    compression: NonFinite
    worst_unit: str | None = None
    worst_share: NonFinite | None = None  # compression over noise
    error: NonFinite | None = None  # of one rank's gradient, once enough steps were measured
    noise_share: NonFinite | None = None


@dataclass(frozen=True)
class _Sync(Head):
    """An average of deltas, with local steps."""

    step: int  # after which it was begun
    fragment: int
    committed: bool
    wire_bytes: int
    wait_s: float
    mean_square: NonFinite  # of the mean delta
    drift_square: NonFinite  # of the ranks' deltas around it
    numbers: Mapping[str, NonFinite]  # that an adaptive policy goes by


@dataclass(frozen=True)
class _End(Head):
    elapsed_s: float
    steps: int = 0


KINDS: Mapping[str, type[Head]] = {
    "run": _Run,
    "step": _Step,
    "eval": _Evaluation,
    "trace": _Trace,
    "plan": _Plan,
    "ledger": _Ledger,
    "sync": _Sync,
    "end": _End,
}
