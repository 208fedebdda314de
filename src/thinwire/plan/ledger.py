"""The error ledger: every saving is a source of gradient error, and each source has a quota.

Per unit and relative to ‖mean g‖² it records, step by step, with a decaying mean:

- ``noise``: σ²/k, what sampling alone does to a mean over k ranks;
- ``compression``: ‖v - C(v)‖², exactly the residual;
- ``staleness``: of gradients that arrive late;
- ``drift``: (1/P) Σ ‖x_i - x̄‖² / (lr·τ)², of replicas that are not averaged in every step.

An error well under the noise does no harm. A controller (of density, bits, rank, interval) owns a term and asks
``advice``: *tighten* when its share of the noise leaves the quota upwards, *relax* when it has been far below it for long.
The two thresholds are a factor apart, and a change must settle before the next, so that advice does not swing.

All numbers that go in must have been reduced over the ranks; then the ledger is the same on every rank, and so is its advice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from thinwire.core import ConfigError
from thinwire.core.schema import from_json, to_json

Term = Literal["noise", "compression", "staleness", "drift"]
Advice = Literal["tighten", "keep", "relax"]


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """How large each error may be, as a share of the noise.

    Args:
        relax_below: relax when a term is under this part of its quota. Lower: more careful.
        decay: of the mean over steps. Higher: slower, steadier.
        settle_steps: records of a term that are needed after a change before it is advised on again.
    """

    compression: float = 0.1
    staleness: float = 0.1
    drift: float = 0.1
    relax_below: float = 0.25
    decay: float = 0.95
    settle_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("compression", "staleness", "drift"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"the quota of {name} is {getattr(self, name)}; expected a share above 0")
        if not (0 <= self.relax_below < 1 and 0 <= self.decay < 1 and self.settle_steps >= 1):
            raise ConfigError(
                f"relax_below is {self.relax_below}, decay {self.decay}, settle_steps {self.settle_steps}; "
                "expected both fractions in [0, 1) and at least one step"
            )


@dataclass
class _Account:
    """The decaying mean of one term of one unit; unbiased from the first step on."""

    total: float = 0.0
    weight: float = 0.0
    steps: int = 0  # since the last change

    def add(self, value: float, decay: float) -> None:
        self.total = decay * self.total + (1 - decay) * value
        self.weight = decay * self.weight + (1 - decay)
        self.steps += 1

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def to_plain(self) -> tuple[float, float, int]:
        return self.total, self.weight, self.steps

    @classmethod
    def from_plain(cls, values: tuple[float, float, int]) -> _Account:
        if min(values) < 0:
            raise ConfigError(f"total, weight and steps are {values}; expected none below 0")
        return cls(*values)


@dataclass(frozen=True)
class _Saved:
    """A ledger as JSON has it."""

    VERSION: ClassVar[int] = 1

    accounts: Mapping[str, Mapping[Term, _Account]]


class ErrorLedger:
    """Errors per unit against the gradient noise.

    Args:
        quotas: the limits; the same on all ranks.
    """

    def __init__(self, quotas: Quotas | None = None) -> None:
        self.quotas = quotas or Quotas()
        self._accounts: dict[str, dict[Term, _Account]] = {}

    @property
    def units(self) -> list[str]:
        """Every unit with a record."""
        return list(self._accounts)

    def record(self, unit: str, term: Term, error_sq: float, mean_sq: float) -> None:
        """Enter one step: the squared error and ‖mean g‖², both reduced over the ranks.

        A step with a zero or non-finite gradient says nothing about relative errors and is left out.

        Raises:
            ConfigError: an unknown term or a negative error.
        """
        if term not in get_args(Term):
            raise ConfigError(f"the ledger has no term {term!r}; expected one of {', '.join(get_args(Term))}")
        if error_sq < 0 or mean_sq < 0:
            raise ConfigError(f"{unit}: squared error {error_sq} and squared norm {mean_sq} must not be negative")
        if not (math.isfinite(error_sq) and math.isfinite(mean_sq)) or mean_sq == 0:
            return
        account = self._accounts.setdefault(unit, {}).setdefault(term, _Account())
        account.add(error_sq / mean_sq, self.quotas.decay)

    def relative(self, unit: str, term: Term) -> float:
        """The error relative to ‖mean g‖²; zero without a record."""
        account = self._accounts.get(unit, {}).get(term)
        return 0.0 if account is None else account.mean

    def share(self, unit: str, term: Term) -> float:
        """The error relative to the noise; infinite for an error without any noise to hide in."""
        noise, error = self.relative(unit, "noise"), self.relative(unit, term)
        if error == 0.0:
            return 0.0
        return error / noise if noise > 0 else math.inf

    def settled(self, unit: str, term: Term) -> bool:
        """Whether there are enough records to act on."""
        account = self._accounts.get(unit, {}).get(term)
        return account is not None and account.steps >= self.quotas.settle_steps

    def advice(self, unit: str, term: Term) -> Advice:
        """What the controller of ``term`` should do now; asking changes nothing.

        Without a noise measurement there is no quota to compare with: keep.
        """
        assert term != "noise", "nobody controls the noise"
        if "noise" not in self._accounts.get(unit, {}) or not self.settled(unit, term):
            return "keep"
        share, quota = self.share(unit, term), float(getattr(self.quotas, term))
        if share > quota:
            return "tighten"
        return "relax" if share < self.quotas.relax_below * quota else "keep"

    def changed(self, unit: str, term: Term) -> None:
        """The controller has followed the advice: the old mean is about another setting, so it is forgotten."""
        self._accounts.get(unit, {}).pop(term, None)

    def worst(self, term: Term) -> tuple[str, float] | None:
        """The unit with the largest share, and that share; None without a record."""
        shares = {unit: self.share(unit, term) for unit, terms in self._accounts.items() if term in terms}
        return max(shares.items(), key=lambda item: item[1], default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values with a version: for checkpoints, events and plots."""
        plain: dict[str, Any] = to_json(_Saved(self._accounts))
        return plain

    def load_json(self, values: Mapping[str, Any]) -> None:
        """Go on from what ``to_json`` described.

        Raises:
            ConfigError: it is something else. Nothing is changed then.
        """
        saved = from_json(_Saved, values, what="error ledger", remedy="start with an empty one")
        self._accounts = {unit: dict(terms) for unit, terms in saved.accounts.items()}


def tightened(value: float, advice: Advice, *, least: float, most: float, factor: float = 2.0) -> float:
    """The next density, bits or rank: larger means less error, one ``factor`` at a time, within the bounds."""
    moved = {"tighten": value * factor, "relax": value / factor, "keep": value}[advice]
    return min(max(moved, least), most)
