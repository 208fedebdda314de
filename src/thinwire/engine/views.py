"""How a gradient is seen by the exchange."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals, without a copy; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def averaged_form(gradient: Tensor) -> Tensor:
    """As it is averaged: dense, and complex ones as pairs of reals."""
    return as_real(gradient.to_dense() if gradient.is_sparse else gradient)
