"""Estimates of the threshold that keeps a given fraction of each segment."""

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

EstimateMethod = Literal["sample", "exponential"]

_SAMPLE_ELEMS_KEPT = 64  # kept entries the sample should hold: the count that results is off by about 1 / sqrt(64)
_MIN_SAMPLE_ELEMS = 1024
_STAGE_DENSITY = 0.25  # each fit of the exponential law is trusted for a quarter of what is left


def estimate_thresholds(
    x: Tensor, offsets: tuple[int, ...], density: float, method: EstimateMethod, seed: int
) -> tuple[float, ...]:
    """One threshold per segment from magnitudes drawn at random (all of them when the segment is small).

    `sample` takes the quantile of the draw. `exponential` fits the tail law: the mean excess over the current threshold
    gives the next one, each stage keeping a quarter, so that only the tail has to look exponential (the multi-stage fit
    of SIDCo, Abdelmoniem et al. 2021). An empty segment, and one whose draw is not finite, gets +inf.
    """
    bounds = list(itertools.pairwise(offsets))
    sizes = [min(stop - start, _sample_elems(density)) for start, stop in bounds]
    magnitudes = x[_draw(bounds, sizes, seed).to(x.device)].abs().cpu()
    fit = _quantile if method == "sample" else _exponential_tail
    return tuple(fit(drawn, density) if _usable(drawn) else math.inf for drawn in torch.split(magnitudes, sizes))


def _sample_elems(density: float) -> int:
    return max(_MIN_SAMPLE_ELEMS, math.ceil(_SAMPLE_ELEMS_KEPT / density))


def _draw(bounds: list[tuple[int, int]], sizes: list[int], seed: int) -> Tensor:
    """Positions in the flat unit: every one of a small segment, a random draw of a large one."""
    generator = torch.Generator().manual_seed(seed)  # never the global one
    parts = [
        torch.arange(start, stop) if size == stop - start else torch.randint(start, stop, (size,), generator=generator)
        for (start, stop), size in zip(bounds, sizes, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _usable(drawn: Tensor) -> bool:
    return drawn.numel() > 0 and bool(torch.isfinite(drawn).all())


def _quantile(drawn: Tensor, density: float) -> float:
    kept = max(1, round(density * drawn.numel()))
    if kept >= drawn.numel():
        return -1.0  # every magnitude exceeds it, zeros included
    return float(drawn.kthvalue(drawn.numel() - kept).values)


def _exponential_tail(drawn: Tensor, density: float) -> float:
    threshold, left = 0.0, 1.0
    while left > density:
        stage = max(_STAGE_DENSITY, density / left)
        excess = drawn[drawn > threshold]
        if not excess.numel():
            break
        threshold += float(excess.mean(dtype=torch.float64) - threshold) * math.log(1.0 / stage)
        left *= stage
    return threshold
