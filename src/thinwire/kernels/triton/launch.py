"""How Triton kernels are declared and started, and the few lines that several of them share."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMS = 2048  # elements one program works on: 16 per thread with Triton's default of 4 warps
INFINITY_KEY = tl.constexpr(0x7F800000)
NAN_KEY = tl.constexpr(0x7F800001)


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` with a type: strict type checking refuses untyped decorators."""
    return triton.jit(function)


def run(compiled: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Start `programs` programs on the device and the current stream of `like`; returns at once.

    Contraction of `a * b + c` into one rounding is switched off: it would differ from the reference in the last bit.
    """
    if programs:
        with torch.cuda.device_of(like):
            compiled[(programs,)](*arguments, enable_fp_fusion=False, **constants)


def zero_flag(like: Tensor) -> Tensor:
    """A zero that kernels set to 1 when they find a NaN or an infinity."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def is_unset(flag: Tensor) -> bool:
    """Whether no kernel set the flag; waits for the device."""
    return not flag.item()


def tiles(elems: int, tile_elems: int = TILE_ELEMS) -> int:
    """How many tiles cover so many elements."""
    return -(-elems // tile_elems)


@kernel
def tile_index(TILE: tl.constexpr) -> tl.tensor:
    """Positions of this program's tile; int64, since the last tile may reach past 2^31."""
    return tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)


@kernel
def compensated(
    grad: tl.tensor, residual: tl.tensor, index: tl.tensor, inside: tl.tensor, HAS_RESIDUAL: tl.constexpr
) -> tl.tensor:
    """`residual + grad` at `index`, 0 outside."""
    unit = tl.load(grad + index, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        unit = tl.load(residual + index, mask=inside, other=0.0) + unit
    return unit


@kernel
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """The bits without the sign: integers that sort like magnitudes, infinity below every NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel
def magnitude_key(x: tl.tensor) -> tl.tensor:
    """`magnitude_bits` with one key for all NaNs, whose payloads decide nothing."""
    return tl.minimum(magnitude_bits(x), NAN_KEY)


@kernel
def raise_flag(flag: tl.tensor, bits: tl.tensor) -> None:
    """Set the flag if one of these magnitudes is infinite or NaN; programs that race write the same 1."""
    tl.store(flag, 1, mask=tl.max(tl.ravel(bits), axis=0) >= INFINITY_KEY)


@kernel
def write_payload(
    unit: tl.tensor, keep: tl.tensor, index: tl.tensor, position: tl.tensor, values: tl.tensor, indices: tl.tensor
) -> None:
    """Write what is kept to `position` of the payload."""
    tl.store(values + position, unit, mask=keep)
    tl.store(indices + position, index.to(tl.int32), mask=keep)


@kernel
def rank_of(keep: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """How many are kept before each element of the tile."""
    return tl.cumsum(keep.to(tl.int32), axis=AXIS) - keep.to(tl.int32)
