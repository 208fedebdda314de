"""Ages of received coordinates and the AdamW step that knows them."""

import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference_ages import COLUMNS
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import TILE_ELEMS, kernel, tile_index


def count_ages(mean: Tensor, since: Tensor, ages: Tensor, cap: int) -> None:
    """See `reference_ages.count_ages`."""
    count = mean.numel()
    launch.run(_count_ages, launch.tiles(count), mean, mean, since, ages, count, CAP=cap, TILE=TILE_ELEMS)


def aged_adamw(
    weight: Tensor,
    grad: Tensor,
    ages: Tensor,
    moment: Tensor,
    square: Tensor,
    table: Tensor,
    decay: float,
    step_size: float,
    correction: float,
    epsilon: float,
) -> None:
    """See `reference_ages.aged_adamw`; moments are neither read nor written where nothing was received."""
    tensors = weight, grad, ages, moment, square, table
    numbers = decay, step_size, correction, epsilon
    count = weight.numel()
    sizes = {"COLUMNS": COLUMNS, "TILE": TILE_ELEMS}
    launch.run(_aged_adamw, launch.tiles(count), weight, *tensors, *numbers, count, **sizes)


@kernel
def _count_ages(
    mean: tl.tensor, since: tl.tensor, ages: tl.tensor, count: tl.tensor, CAP: tl.constexpr, TILE: tl.constexpr
) -> None:
    index = tile_index(TILE)
    inside = index < count
    age = tl.minimum(tl.load(since + index, mask=inside, other=0).to(tl.int32) + 1, CAP)
    came = tl.load(mean + index, mask=inside, other=0.0) != 0.0
    tl.store(ages + index, tl.where(came, age, 0).to(tl.uint8), mask=inside)
    tl.store(since + index, tl.where(came, 0, age).to(tl.uint8), mask=inside)


@kernel
def _aged_adamw(
    weight: tl.tensor,
    grad: tl.tensor,
    ages: tl.tensor,
    moment: tl.tensor,
    square: tl.tensor,
    table: tl.tensor,
    decay: tl.tensor,
    step_size: tl.tensor,
    correction: tl.tensor,
    epsilon: tl.tensor,
    count: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    index = tile_index(TILE)
    inside = index < count
    age = tl.load(ages + index, mask=inside, other=0).to(tl.int32)
    came = age > 0
    row = table + age * COLUMNS
    fresh = tl.load(grad + index, mask=came, other=0.0)
    first = tl.load(moment + index, mask=came, other=0.0) * tl.load(row, mask=came, other=0.0)
    first += fresh * tl.load(row + 1, mask=came, other=0.0)
    second = tl.load(square + index, mask=came, other=0.0) * tl.load(row + 2, mask=came, other=0.0)
    second += fresh * fresh * tl.load(row + 3, mask=came, other=0.0)
    step = tl.load(row + 4, mask=came, other=0.0) * step_size
    size = tl.sqrt_rn(second) * correction + epsilon
    # Where nothing came the size may be 0; the quotient is not used there, but a division by 0 would warn.
    moved = tl.div_rn(first * step, tl.where(came, size, 1.0))
    decayed = tl.load(weight + index, mask=inside, other=0.0) * decay
    tl.store(moment + index, first, mask=came)
    tl.store(square + index, second, mask=came)
    tl.store(weight + index, tl.where(came, decayed - moved, decayed), mask=inside)
