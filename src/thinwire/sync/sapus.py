"""A self-adaptive interval after SaPus (TPDS'21): an own reconstruction, because its formulas are not public."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, isfinite, sqrt
from statistics import fmean, pstdev, pvariance
from typing import ClassVar

from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers, Round

_LONGEST = 64


@dataclass(frozen=True, kw_only=True)
class SaPus(Local):
    """Local steps whose interval and weights adapt: the collective form, in which all ranks agree on the interval.

    * Weights: a rank with loss l counts clip(exp(-(l - L)/(4 s)), ½, 2), with the mean L and deviation s of the last average.
    * Loss window of the last 8 averages: τ_stat = ceil(τ0·sqrt(L/L0 · lr0/lr)), halved while its halves differ by less than
      their standard error.
    * Performance: τ_sys is the smallest interval at which the slowest exchange takes at most ``share`` of the steps.
    * τ = max of both, at most 64, at most doubled or halved per decision, and kept for changes below 10 %.

    Report the loss with ``wire.report_loss``. Seconds differ between ranks; the largest of all decides, everywhere alike.

    Args:
        h: τ0, the first interval.
        share: ε; smaller: longer intervals on slow links.
    """

    h: int = 8
    share: float = 0.1

    scalars: ClassVar[tuple[str, ...]] = ("loss", "lr", "step_s", "exchange_s")
    window: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("share", self.share > 0, "a positive share")
        self._require("delay", self.delay <= 1, "0 or 1: the interval may fall to one step")

    def weight(self, numbers: Numbers, loss: float) -> float:
        if not isfinite(loss) or numbers.get("deviation", 0.0) <= 0:
            return 1.0
        return min(max(exp(min((numbers["mean"] - loss) / (4 * numbers["deviation"]), 1.0)), 0.5), 2.0)

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        losses, rate = round_.scalars["loss"], fmean(round_.scalars["lr"])
        numbers["mean"], numbers["deviation"] = fmean(losses), pstdev(losses)
        first, first_rate = numbers.setdefault("loss", numbers["mean"]), numbers.setdefault("lr", rate)
        count = int(numbers.get("count", 0))
        numbers[f"window{count % self.window}"], numbers["count"] = numbers["mean"], count + 1
        ratio = numbers["mean"] / first * first_rate / rate if first * rate else 1.0
        stat = ceil(self.h * sqrt(ratio)) if isfinite(ratio) and ratio > 0 else self.h
        if self._stalls(numbers):
            stat = ceil(stat / 2)
        system = max(round_.scalars["exchange_s"]) / (self.share * max(*round_.scalars["step_s"], 1e-9))
        before = numbers["interval"]
        wanted = min(max(stat, ceil(min(system, _LONGEST)), 1), _LONGEST, 2 * before)
        if abs(wanted - before) >= 0.1 * before:
            numbers["interval"] = max(wanted, ceil(before / 2))

    def _stalls(self, numbers: Numbers) -> bool:
        count = int(numbers["count"])
        if count < self.window:
            return False
        ordered = [numbers[f"window{number % self.window}"] for number in range(count - self.window, count)]
        old, new = ordered[: self.window // 2], ordered[self.window // 2 :]
        error = sqrt((pvariance(old) + pvariance(new)) / len(new))
        return fmean(old) - fmean(new) < error
