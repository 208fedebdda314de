"""How long something of a given size takes, as measured: a piecewise-linear curve."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from thinwire.core import ConfigError


@dataclass(frozen=True)
class Curve:
    """Seconds by size, linear between points.

    Below the first point the curve is flat (a start-up does not shrink with the message), beyond the last it goes on
    with the slope of the last two points. One point makes a constant.

    Args:
        points: ``(size, seconds)`` with strictly ascending sizes.

    Raises:
        ConfigError: no points, sizes out of order, or numbers that are negative or not finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a curve needs at least one (size, seconds) point; got none: measure something first")
        if any(not (math.isfinite(value) and value >= 0) for point in self.points for value in point):
            raise ConfigError(f"sizes and seconds of a curve must be finite and not negative; got {self.points}")
        sizes = [size for size, _ in self.points]
        if any(left >= right for left, right in pairwise(sizes)):
            raise ConfigError(f"the sizes of a curve must ascend strictly; got {sizes}. Use Curve.fit for raw samples")

    def __call__(self, size: float) -> float:
        """Seconds at ``size``."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(bisect_right(points, (size, math.inf)), len(points) - 1)
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return max(0.0, low_s + (size - low) * (high_s - low_s) / (high - low))

    @classmethod
    def fit(cls, samples: Iterable[tuple[float, float]]) -> Curve:
        """The non-decreasing curve through noisy ``(size, seconds)`` samples.

        Medians over bins of a factor of two withstand outliers and keep start-up and bandwidth apart. Neighbouring
        bins that contradict "larger takes no less" become one point at their common mean; a flat piece instead would
        make the slope beyond the last point zero, and a planner would believe that everything may be fused for free.

        Raises:
            ConfigError: no samples.
        """
        bins: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for size, seconds in samples:
            bins[math.floor(math.log2(max(size, 0.5)))].append((size, seconds))
        blocks: list[tuple[float, float, int]] = []  # (size, seconds, number of samples)
        for _, members in sorted(bins.items()):
            sizes, times = zip(*members, strict=True)
            blocks.append((median(sizes), median(times), len(members)))
            while len(blocks) > 1 and blocks[-1][1] <= blocks[-2][1]:
                blocks[-2:] = [_pool(blocks[-2], blocks[-1])]
        return cls(tuple((size, seconds) for size, seconds, _ in blocks))

    def to_plain(self) -> tuple[tuple[float, float], ...]:
        """The points alone, for JSON."""
        return self.points

    @classmethod
    def from_plain(cls, points: tuple[tuple[float, float], ...]) -> Curve:
        """What ``to_plain`` gave."""
        return cls(points)


def _pool(left: tuple[float, float, int], right: tuple[float, float, int]) -> tuple[float, float, int]:
    count = left[2] + right[2]
    size, seconds = ((left[i] * left[2] + right[i] * right[2]) / count for i in (0, 1))
    return size, seconds, count
