"""The kernels of optimizers that know the age of what they receive, in plain torch: the definition of the faster ones.

Arguments arrive checked by `thinwire.kernels.ages`: flat contiguous tensors of one length, fp32 or uint8.
"""

import torch
from torch import Tensor

AGES = 256  # rows of a table: every value that a uint8 can have
COLUMNS = 5  # keep of the first moment, its intake, keep of the second moment, its intake, the age itself


def count_ages(mean: Tensor, since: Tensor, ages: Tensor, cap: int) -> None:
    """`age = min(since + 1, cap)`; where `mean` is not 0, `ages = age` and `since = 0`, elsewhere 0 and `age`."""
    age = since.clamp_max(cap - 1) + 1
    came = mean != 0
    ages.copy_(torch.where(came, age, 0))
    since.copy_(torch.where(came, 0, age))


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
    """One AdamW step in place; `table` holds `COLUMNS` fp32 numbers for every age.

    All weights are multiplied by `decay`. Where an age is above 0::

        moment = moment * keep1 + grad * intake1
        square = square * keep2 + grad² * intake2
        weight -= moment * (age * step_size) / (√square * correction + epsilon)
    """
    weight.mul_(decay)
    at = ages.nonzero().squeeze(1)
    keep1, intake1, keep2, intake2, age = table.view(AGES, COLUMNS)[ages[at].long()].unbind(1)
    fresh = grad[at]
    first = moment[at] * keep1 + fresh * intake1
    second = square[at] * keep2 + fresh * fresh * intake2
    # torch's fp32 square root is off by a bit where MKL computes it; fp64 rounded to fp32 is exact.
    size = second.double().sqrt().float() * correction + epsilon
    moment[at], square[at] = first, second
    weight[at] -= first * (age * step_size) / size
