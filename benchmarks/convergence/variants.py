"""Forms of the age correction that were tried and are not in the product, for the ablation table; slow and plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a coordinate that was received with age a, as the sum s, is taken into AdamW.

    Args:
        second: what the second moment takes in: ``sum`` s²/a (the product), ``mean`` (s/a)², ``blend`` between the two by the
            tensor's share of signal Σm̂²/Σv̂, ``innovation`` (s - a·m̂)²/a + m̂².
        cap: the highest age; None: no limit.
        grain: an age per ``element``, or the mean interval between receipts per ``row`` or per ``tensor``.
        stride: the weight moves by ``age`` steps at a receipt, or by ``one``.
    """

    second: Literal["sum", "mean", "blend", "innovation"] = "sum"
    cap: int | None = 200
    grain: Literal["element", "row", "tensor"] = "element"
    stride: Literal["age", "one"] = "age"


VARIANTS: dict[str, Variant] = {
    "(s/a)² in place of s²/a": Variant(second="mean"),
    "blend of both by noise scale": Variant(second="blend"),
    "innovation (s - a·m)²/a + m²": Variant(second="innovation"),
    "cap 50": Variant(cap=50),
    "no cap": Variant(cap=None),
    "one age per row": Variant(grain="row"),
    "one age per tensor": Variant(grain="tensor"),
    "one step per receipt": Variant(stride="one"),
}
GRAINS = ("one age per row", "one age per tensor")
SMOOTHING = 0.98  # of the counts from which intervals per row and tensor are taken


class ExperimentalAdamW(torch.optim.Optimizer):
    """AdamW with any form of the correction; it finds the ages by itself, from what is zero.

    Args:
        sparse: the names of parameters that travel sparse.
    """

    def __init__(
        self, named: Mapping[str, Tensor], sparse: set[str], variant: Variant, *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(list(named.values()), {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 1e-2})
        self._variant = variant
        self._sparse = {id(parameter) for name, parameter in named.items() if name in sparse}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step with the gradients that are there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(group, parameter, self.state[parameter])

    def _update(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, since=torch.zeros_like(weight))
            # As torch names them: compressors ask optimizers for their second moment.
            state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
            state.update(received=torch.zeros_like(_per_row(weight)), steps=0.0)
        state["step"] += 1
        assert weight.grad is not None
        s, (beta1, beta2) = weight.grad, group["betas"]
        came = s.ne(0) if id(weight) in self._sparse else torch.ones_like(s, dtype=torch.bool)
        age = self._age(came, state)
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        old_m, old_v = state["exp_avg"], state["exp_avg_sq"]
        q = self._second(s, age, old_m / correction1, old_v / correction2)
        m = torch.lerp(s / age, old_m, beta1**age)
        v = torch.lerp(q, old_v, beta2**age)
        state["exp_avg"], state["exp_avg_sq"] = torch.where(came, m, old_m), torch.where(came, v, old_v)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        stride = age if self._variant.stride == "age" else torch.ones_like(age)
        moved = group["lr"] * stride * (m / correction1) / ((v / correction2).sqrt() + group["eps"])
        weight.sub_(torch.where(came, moved, 0.0))

    def _age(self, came: Tensor, state: dict[str, Any]) -> Tensor:
        since: Tensor = state["since"] + 1
        state["since"] = torch.where(came, 0.0, since)
        if self._variant.grain != "element":
            since = self._interval(came, state).expand_as(since)
        return since if self._variant.cap is None else since.clamp_max(self._variant.cap)

    def _interval(self, came: Tensor, state: dict[str, Any]) -> Tensor:
        """How many steps pass on average between receipts of an element of each row, or of the tensor."""
        state["received"].mul_(SMOOTHING).add_(_per_row(came.float()))
        state["steps"] = SMOOTHING * state["steps"] + 1
        share: Tensor = state["received"] / state["steps"]
        return (share if self._variant.grain == "row" else share.mean()).clamp_min(1e-3).reciprocal()

    def _second(self, s: Tensor, age: Tensor, m: Tensor, v: Tensor) -> Tensor:
        match self._variant.second:
            case "mean":
                return (s / age).square()
            case "blend":
                signal = (m.square().sum() / v.sum().clamp_min(1e-30)).clamp(0, 1)
                return torch.lerp(s.square() / age, (s / age).square(), signal)
            case "innovation":
                return (s - age * m).square() / age + m.square()
            case _:
                return s.square() / age


def _per_row(x: Tensor) -> Tensor:
    """The mean over everything but the first axis, which is kept so that it broadcasts."""
    return x if x.dim() < 2 else x.mean(dim=tuple(range(1, x.dim())), keepdim=True)
