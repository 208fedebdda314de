"""Kernels for optimizers that know the age of what they receive.

`count_ages` turns the mean of a step into ages, `aged_adamw` is the AdamW step for them. Semantics are defined by
`thinwire.kernels.reference_ages`; faster kernels equal it bit for bit.
"""

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import kernels_for
from thinwire.kernels.reference_ages import AGES, COLUMNS

MAX_AGE = 200


def count_ages(mean: Tensor, since: Tensor, ages: Tensor, *, cap: int = MAX_AGE) -> None:
    """End a step of one tensor: what is not 0 in `mean` (flat) was received.

    Args:
        since: uint8, steps since the last receipt, counted up to `cap`; updated in place.
        ages: uint8, receives how many steps what came now stands for; 0 where nothing came.
    """
    if not 1 <= cap < AGES:
        raise ValueError(f"cap: got {cap}, expected 1 to {AGES - 1}, since ages are bytes")
    mean = check.flat_fp32(mean, "mean")
    check.bytes_of(since, mean, "since")
    check.bytes_of(ages, mean, "ages")
    kernels_for(mean.device.type).count_ages(mean, since, ages, cap)


def aged_adamw(
    weight: Tensor,
    grad: Tensor,
    ages: Tensor,
    moment: Tensor,
    square: Tensor,
    table: Tensor,
    *,
    decay: float,
    step_size: float,
    correction: float,
    epsilon: float,
) -> None:
    """One AdamW step, in place, on flat fp32 tensors of which only coordinates with an age above 0 were received.

    Args:
        table: what `adamw_table` gives.
        decay: factor of every weight, `1 - lr * weight_decay`.
        step_size: `lr / (1 - beta1^t)`.
        correction: `1 / sqrt(1 - beta2^t)`.
    """
    numel = weight.numel()
    for name, x in (("weight", weight), ("grad", grad), ("moment", moment), ("square", square)):
        check.on_device(check.writable_fp32(x, numel, name), weight, name)
    check.on_device(check.writable_fp32(table, AGES * COLUMNS, "table"), weight, "table")
    check.bytes_of(ages, weight, "ages")
    numbers = decay, step_size, correction, epsilon
    kernels_for(weight.device.type).aged_adamw(weight, grad, ages, moment, square, table, *numbers)


@lru_cache(maxsize=64)
def adamw_table(beta1: float, beta2: float, max_age: int, maximize: bool, device: torch.device) -> Tensor:
    """For every age a, counted up to `max_age`: β1^a, (1 - β1^a) / a, β2^a, (1 - β2^a) / a, and a itself.

    What arrives is a sum s of a gradients: `intake1 * s` is the mean gradient s / a with the weight that a steps give it,
    `intake2 * s²` the second moment of one gradient, s² / a, likewise. To maximise, the first intake changes its sign.
    """
    if not 1 <= max_age <= MAX_AGE:
        raise ValueError(f"max_age: got {max_age}, expected 1 to {MAX_AGE}")
    return _table(torch.arange(AGES, dtype=torch.float64).clamp(1, max_age), beta1, beta2, maximize, device)


def one_age_table(age: float, beta1: float, beta2: float, maximize: bool, device: torch.device) -> Tensor:
    """The table in which every age counts as `age`, a number of steps that need not be whole."""
    row = _table(torch.tensor([age], dtype=torch.float64), beta1, beta2, maximize, device)
    return row.expand(AGES, COLUMNS).flatten()


def _table(age: Tensor, beta1: float, beta2: float, maximize: bool, device: torch.device) -> Tensor:
    keep1, keep2 = beta1**age, beta2**age
    intake1 = (keep1 - 1) / age if maximize else (1 - keep1) / age
    rows = torch.stack([keep1, intake1, keep2, (1 - keep2) / age, age], dim=1)
    return rows.flatten().to(device, torch.float32)
