"""Local SGD: Stich, Local SGD Converges Fast and Communicates Little (ICLR'19)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.sync.local_steps import Numbers, Periodic


@dataclass(frozen=True, kw_only=True)
class Local(Periodic):
    """Average the weights every ``h`` steps: A' = A + mean of (x_i - A), x = A'.

    Args:
        h: local steps between two averages; more send fewer bytes, and replicas drift further apart.
    """

    h: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("h", self.h >= 1, "1 step or more")
        self._require("delay", self.delay <= self.h, "at most h: a delta leaves once the last mean is in")

    def begin(self) -> Numbers:
        return {"interval": self.h}
