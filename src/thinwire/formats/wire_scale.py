"""Wire scale: one power of two per tensor, agreed over the ranks from the largest magnitude any of them has.

s = 2^floor(log2(M·h / (terms·A))), with M the largest value of the format, A the largest magnitude over the ranks when it
was last looked at, ``terms`` the number of values that are added in the format, and h = 1/2 the margin for growth since.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.formats.blocks import floor_log2

UNKNOWN = -1.0  # an amax that nobody has measured yet
HEADROOM = 0.5
_LARGEST_EXPONENT = 126  # 2^±126 are normal in fp32, and so are their inverses


def scale_exponents(amax: Tensor, largest: float, terms: int) -> Tensor:
    """log2 of the scales.

    An amax of 0 gives the largest scale: whatever comes next saturates, which is noticed, instead of vanishing.
    """
    scales = largest * HEADROOM / (terms * amax.double().clamp(min=2.0**-160))
    exponents = floor_log2(scales.clamp(max=2.0**160)).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.where(torch.isfinite(amax), exponents, -_LARGEST_EXPONENT)


def saturates(amax: Tensor, exponents: Tensor, largest: float, terms: int) -> Tensor:
    """Whether a tensor with this amax, scaled like this, could exceed the format in a sum of ``terms``."""
    return torch.ldexp(amax.double(), exponents) * terms > largest


def with_amax(wire_state: Mapping[str, Any], amax: Mapping[str, float]) -> dict[str, Any]:
    """The ``state_dict()`` of an attached wire with these magnitudes put in, for ``load_state_dict()``.

    It hands the amax table of a ``LayerScaler`` to a wire with agreed scales, which then need not measure first. All
    ranks must put in the same numbers. Tensors that have no wire scale, or are not in the table, stay as they are.
    """
    state = {**wire_state, "tensors": copy.deepcopy(wire_state["tensors"])}
    for name, pieces in state["tensors"].items():
        if "amax" in pieces and name in amax:
            pieces["amax"].fill_(amax[name])
    return state
