"""The norm test of momentum-driven synchronisation (JPDC'22), in its collective form: an own reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from thinwire.sync.deltas import SQUARE
from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers, Round

_SMOOTHING = 0.7  # of the measured ratio, from average to average


@dataclass(frozen=True, kw_only=True)
class MomentumK(Local):
    """Local steps whose number follows the noise: as few as give a mean delta that passes the norm test.

    With σ² = W/(W-1)·(mean |Δ_i|² - |mean Δ|²) the test wants σ²/k ≤ θ²·|mean Δ|² for k workers. Where all W of them are
    too few, averaging so often sends mostly noise and the interval grows by one; where half of them would do, it shrinks by
    one. ``|mean Δ|²`` contains σ²/W of noise itself, which is subtracted.

    Args:
        h: the first interval.
        longest: the interval's limit; replicas drift further apart in longer ones.
        theta: θ; smaller asks for cleaner means, and gives longer intervals.
    """

    h: int = 4
    longest: int = 32
    theta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("longest", self.longest >= self.h, "h or more")
        self._require("theta", self.theta > 0, "a positive number")
        self._require("delay", self.delay <= 1, "0 or 1: the interval may fall to one step")

    def adapt(self, numbers: Numbers, round_: Round) -> None:
        squares = round_.scalars[SQUARE]
        world = len(squares)
        noise = max(fmean(squares) - round_.mean_square, 0.0) * world / (world - 1)
        signal = max(round_.mean_square - noise / world, 1e-12 * round_.mean_square)
        needed = min(noise / (self.theta**2 * signal), 1e6) if signal > 0 else 0.0
        needed = numbers["needed"] = _SMOOTHING * numbers.get("needed", needed) + (1 - _SMOOTHING) * needed
        change = 1 if needed > world else -1 if needed < world / 2 else 0
        numbers["interval"] = min(max(numbers["interval"] + change, 1), self.longest)
