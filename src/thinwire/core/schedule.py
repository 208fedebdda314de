"""Numbers that follow the step: ``topk(density=warmup(0.25, 0.01, steps=200))``.

With t = (step - after) / steps, clipped to 0..1, the value goes from ``start`` (t = 0) to ``end`` (t = 1):

========== =========================================== =======================================================
name       value                                       for
========== =========================================== =======================================================
``linear`` start + t·(end - start)
``exp``    start·(end / start)^t
``warmup`` as ``exp``, in four equal stairs            the warm-up of Deep Gradient Compression (ICLR'18):
                                                       0.25, 0.063, 0.016, 0.004 and then 0.001
``anneal`` start + (1 - cos πt)/2·(end - start)        slow at both ends
========== =========================================== =======================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.core.errors import ConfigError

_WARMUP_STAIRS = 4


def _geometric(start: float, end: float, t: float) -> float:
    return float(start * (end / start) ** t)


SHAPES: Mapping[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, t: start + t * (end - start),
    "exp": _geometric,
    "warmup": lambda start, end, t: _geometric(start, end, math.floor(t * _WARMUP_STAIRS) / _WARMUP_STAIRS),
    "anneal": lambda start, end, t: start + (1 - math.cos(math.pi * t)) / 2 * (end - start),
}


class Schedule(float):
    """A number that depends on the step. Where a plain number is wanted, it stands for its last value.

    That makes prices and plans hold for the long run; ``at(step)`` gives the value in force at a step.

    Args:
        shape: a key of ``SHAPES``.
        start: the value up to step ``after``.
        end: the value from step ``after + steps`` on.
        steps: how many steps the change takes.
        after: the step at which it begins.
    """

    def __new__(cls, shape: str, start: float, end: float, steps: int, after: int = 0) -> Schedule:
        _check(shape, start, end, steps, after)
        return super().__new__(cls, end)

    def __init__(self, shape: str, start: float, end: float, steps: int, after: int = 0) -> None:
        self._key = (shape, start, end, steps, after)

    @property
    def bounds(self) -> tuple[float, float]:
        """Start and end; all values lie between them."""
        return self._key[1], self._key[2]

    def at(self, step: int) -> float:
        """The value in force at ``step``."""
        shape, start, end, steps, after = self._key
        if step >= after + steps:
            return float(end)
        return float(SHAPES[shape](start, end, max(0, step - after) / steps))

    def __eq__(self, other: object) -> bool:
        """Not as a number: a schedule that ends at 0.01 is another setting than 0.01."""
        return isinstance(other, Schedule) and self._key == other._key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return Schedule, self._key

    def __repr__(self) -> str:
        shape, start, end, steps, after = self._key
        delay = f", after={after!r}" if after else ""
        return f"{shape}({start!r}, {end!r}, steps={steps!r}{delay})"


def read_schedule(shape: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Schedule:
    """A schedule from the arguments of its text form.

    Raises:
        ConfigError: arguments that are missing, unknown or make no sense.
    """
    try:
        return Schedule(shape, *positional, **named)
    except TypeError:
        given = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
        raise ConfigError(
            f"{shape} got ({given}); write {shape}(0.25, 0.01, steps=200), and after=100 to begin later."
        ) from None


def _check(shape: str, start: float, end: float, steps: int, after: int) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"unknown schedule {shape!r}. Available: {', '.join(SHAPES)}.")
    for name, value in (("start", start), ("end", end)):
        if isinstance(value, bool | Schedule) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{shape}: {name} is {value!r}; expected a number above 0")
    for name, count, least in (("steps", steps, 1), ("after", after, 0)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ConfigError(f"{shape}: {name} is {count!r}; expected a whole number of steps, at least {least}")
