"""The two roofs of one rank: how fast it computes, and how fast it moves memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_MATRIX_SIDE = 768
_COPY_ELEMS = 4 << 20
_REPEATS = 4


@dataclass(frozen=True)
class Roofs:
    """Measured with the threads that training uses."""

    flops_per_s: float
    memory_bytes_per_s: float


def measure_roofs(device: torch.device | None = None) -> Roofs:
    """The best of a few large matrix products and copies: a roof is what is attainable, not what is usual."""
    left, right = (torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, device=device) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(_COPY_ELEMS, device=device)
    target = torch.empty_like(source)
    product_s = min(_seconds(lambda: torch.mm(left, right, out=product), device) for _ in range(_REPEATS))
    copy_s = min(_seconds(lambda: target.copy_(source), device) for _ in range(_REPEATS))
    return Roofs(2 * _MATRIX_SIDE**3 / product_s, 2 * source.nbytes / copy_s)


def _seconds(work: Callable[[], object], device: torch.device | None) -> float:
    began_s = time.perf_counter()
    work()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began_s, 1e-9)
