"""AdamW for gradients of which only some coordinates arrive, each as the sum of all steps since it last did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.core import ConfigError
from thinwire.engine.ages import Wire
from thinwire.kernels.ages import MAX_AGE, adamw_table, aged_adamw, one_age_table
from thinwire.kernels.reference_ages import AGES, COLUMNS
from thinwire.optim.split import Aged, eager, evaluate, find_aged, hidden, unhooked

Grain = Literal["element", "tensor"]
SMOOTHING = 0.98  # of the counts of what came, per step


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that knows the age of what it receives; without a sparsifier it is exactly torch's.

    Top-k with error feedback sends a coordinate once in a steps, as the sum s of a gradients. Stock AdamW takes s for one
    gradient: √v becomes about √a times too large, and the coordinate moves once instead of a times. Here, for a coordinate
    received at step t with age a (1 ≤ a ≤ ``max_age``)::

        m ← β1^a · m + (1 − β1^a) · s/a          the mean gradient, with the weight of a steps
        v ← β2^a · v + (1 − β2^a) · s²/a         a sum of a independent gradients has a times the variance of one
        w ← w − lr · a · m̂ / (√v̂ + eps)          m̂ = m / (1 − β1^t), v̂ = v / (1 − β2^t), as usual

    Coordinates that were not received keep m, v and w; decoupled weight decay reaches all of them in every step. With a = 1
    everywhere this is AdamW. Own method, evidence in ``docs/results/optimizers.md``.

    All arguments and the state dict are torch's, and parameters that travel dense (all of them with a compressor such as
    ``int4``) take torch's own step. ``fused`` and ``foreach`` concern only these. ``capturable`` and ``differentiable`` are
    refused for parameters that travel sparse.

    Args:
        max_age: higher ages count as this one. Lower: sums of many steps move a weight less far.
        grain: whose age a is. ``element``: each coordinate's own. ``tensor``: one for all, the mean number of steps between
            two receipts of a coordinate over the last fifty steps or so. What comes often then moves further than AdamW
            would move it, which amounts to a higher learning rate: measured to be the better form with
            ``topk(score='update')``, and less stable where the learning rate is too high (docs/results/optimizers.md).
        wire: whom to ask what was received; default: the wire that is attached to each parameter.
    """

    reads_ages = True
    max_age = MAX_AGE
    grain: Grain = "element"
    wire: Wire | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_age: int = MAX_AGE,
        grain: Grain = "element",
        wire: Wire | None = None,
    ) -> None:
        if not 1 <= max_age <= MAX_AGE:
            raise ConfigError(f"max_age is {max_age}; expected a number of steps from 1 to {MAX_AGE}")
        if grain not in get_args(Grain):
            raise ConfigError(f"grain is {grain!r}; expected one of {', '.join(get_args(Grain))}")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.max_age, self.grain, self.wire = max_age, grain, wire
        # A fused optimizer unscales and skips inside its kernel; ours leaves both to the GradScaler.
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "max_age": self.max_age,
            "grain": self.grain,
            "_step_supports_amp_scaling": False,
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the gradients that are there."""
        return _step(self, closure)


@eager
def _step(optimizer: AdamW, closure: Callable[[], float] | None) -> float | None:
    loss = evaluate(closure)
    aged = find_aged(optimizer, optimizer.wire)
    with hidden(aged):
        unhooked(torch.optim.AdamW.step)(optimizer)
    for one in aged:
        state = _state(optimizer, one)
        age = _mean_interval(state, one.ages, optimizer.max_age) if optimizer.grain == "tensor" else None
        _update(one, state, optimizer.max_age, age)
    return loss


def _state(optimizer: AdamW, one: Aged) -> dict[str, Any]:
    """The parameter's state as torch's AdamW would have made it."""
    state: dict[str, Any] = optimizer.state[one.parameter]
    if not state:
        wide = torch.get_default_dtype() is torch.float64
        device = one.parameter.device if one.group["fused"] else None
        state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if one.group["amsgrad"] else [])):
            state[name] = torch.zeros_like(one.parameter, memory_format=torch.preserve_format)
    return state


def _mean_interval(state: dict[str, Any], ages: Tensor, max_age: int) -> float:
    """The steps between two receipts of a coordinate, from how many came in each step; what came long ago fades.

    Kept as plain numbers: tensors in an optimizer's state are cast to the parameter's type when they are loaded.
    """
    received: float = SMOOTHING * state.get("received", 0.0) + int(ages.count_nonzero())
    expected: float = SMOOTHING * state.get("expected", 0.0) + ages.numel()
    state.update(received=received, expected=expected)
    return min(expected / max(received, 1e-30), float(max_age))


def _update(one: Aged, state: dict[str, Any], max_age: int, age: float | None) -> None:
    group, parameter = one.group, one.parameter
    state["step"] += 1
    steps, lr = float(state["step"]), float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    how = beta1, beta2, bool(group["maximize"]), parameter.device
    table = adamw_table(beta1, beta2, max_age, *how[2:]) if age is None else one_age_table(age, *how)
    numbers = {
        "decay": 1 - lr * float(group["weight_decay"]),
        "step_size": lr / (1 - beta1**steps),
        "correction": (1 - beta2**steps) ** -0.5,
        "epsilon": float(group["eps"]),
    }
    tensors = (parameter, one.grad, state["exp_avg"], state["exp_avg_sq"])
    if not group["amsgrad"] and all(x.dtype is torch.float32 and x.is_contiguous() for x in tensors):
        weight, grad, moment, square = (x.detach().view(-1) for x in tensors)
        aged_adamw(weight, grad, one.ages.view(-1), moment, square, table, **numbers)
    else:
        _update_in_torch(*tensors, state.get("max_exp_avg_sq"), one.ages, table, **numbers)


def _update_in_torch(
    weight: Tensor,
    grad: Tensor,
    moment: Tensor,
    square: Tensor,
    largest: Tensor | None,
    ages: Tensor,
    table: Tensor,
    *,
    decay: float,
    step_size: float,
    correction: float,
    epsilon: float,
) -> None:
    """The same step for other types, strides and AMSGrad, which no kernel has."""
    weight.mul_(decay)
    at = ages.nonzero(as_tuple=True)
    keep1, intake1, keep2, intake2, age = table.view(AGES, COLUMNS)[ages[at].long()].to(weight.dtype).unbind(1)
    fresh = grad[at].to(weight.dtype)
    moment[at] = moment[at] * keep1 + fresh * intake1
    square[at] = square[at] * keep2 + fresh * fresh * intake2
    second = square[at]
    if largest is not None:
        second = largest[at] = torch.maximum(largest[at], second)
    weight[at] -= moment[at] * (age * step_size) / (second.sqrt() * correction + epsilon)
