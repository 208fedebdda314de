"""The kernels of `thinwire.kernels.reference_ages`, in C."""

from torch import Tensor

from thinwire.kernels.native.library import library


def count_ages(mean: Tensor, since: Tensor, ages: Tensor, cap: int) -> None:
    """See `reference_ages.count_ages`."""
    library().tw_count_ages(mean.data_ptr(), since.data_ptr(), ages.data_ptr(), cap, mean.numel())


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
    """See `reference_ages.aged_adamw`."""
    pointers = (x.data_ptr() for x in (weight, grad, ages, moment, square, table))
    library().tw_aged_adamw(*pointers, decay, step_size, correction, epsilon, weight.numel())
