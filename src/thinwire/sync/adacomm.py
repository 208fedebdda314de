"""AdaComm: Wang and Joshi, Adaptive Communication Strategies ... in Local-Update SGD (MLSys'19), section 4."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from statistics import fmean
from typing import ClassVar

from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers, Round


@dataclass(frozen=True, kw_only=True)
class AdaComm(Local):
    """Local SGD whose interval falls with the loss: τ = ceil(τ0·sqrt(F/F0 · lr0/lr)), halved where that fails to fall.

    F is the mean loss over ranks since the last average; the paper decides every so many seconds, this every ``every``
    averages, because seconds differ between ranks. Report the loss with ``wire.report_loss``.

    Args:
        h: τ0, the first interval and the longest.
        every: averages between decisions; more: steadier.
    """

    h: int = 16
    every: int = 4

    scalars: ClassVar[tuple[str, ...]] = ("loss", "lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("every", self.every >= 1, "1 average or more")
        self._require("delay", self.delay <= 1, "0 or 1: the interval may fall to one step")

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        loss, rate = fmean(round_.scalars["loss"]), fmean(round_.scalars["lr"])
        first, first_rate = numbers.setdefault("loss", loss), numbers.setdefault("lr", rate)
        numbers["rounds"] = numbers.get("rounds", 0) + 1
        if numbers["rounds"] % self.every:
            return
        before, ratio = numbers["interval"], loss / first * first_rate / rate if first * rate else 1.0
        wanted = ceil(self.h * sqrt(ratio)) if isfinite(ratio) and ratio > 0 else before
        numbers["interval"] = min(max(wanted if wanted < before else ceil(before / 2), 1), self.h)
