"""SGD with momentum for gradients of which only some coordinates arrive, each as the sum of all steps since it last did."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.core import ConfigError
from thinwire.engine.ages import Wire
from thinwire.kernels.ages import MAX_AGE
from thinwire.optim.split import Aged, eager, evaluate, find_aged, hidden, unhooked

Masking = Literal["age", "dgc"]


class SGD(torch.optim.SGD):
    """``torch.optim.SGD`` with momentum factor masking; without a sparsifier it is exactly torch's.

    Stock SGD goes on moving a coordinate along its momentum in steps in which nothing arrived for it. Here momentum acts
    only where something was received (Lin et al., Deep Gradient Compression, ICLR'18, section 3.3, mask the momentum of the
    sender; this is its counterpart at the receiver). A coordinate received with age a, as the sum s of a gradients, makes
    the a steps it has missed at once, each with the mean gradient g = s/a + weight_decay · w::

        b ← μ^a · b + (1 − μ^a)/(1 − μ) · g                   where a steps of b ← μ·b + g lead
        w ← w − lr · (A · b_old + B · g)                      the sum of what these a steps would have moved
        A = μ·(1 − μ^a)/(1 − μ),  B = (a − A)/(1 − μ)         with Nesterov: A → μ·A, B → a + μ·B

    Coordinates that were not received keep b and w (no weight decay either: it is part of g). With a = 1 everywhere this is
    torch's SGD. ``masking="dgc"`` takes b_old = 0: momentum restarts at every receipt, as in DGC, where a sent
    coordinate's momentum is cleared. (The ``dgc`` compressor does that at the sender; use it with momentum 0.)

    All arguments and the state dict are torch's, and parameters that travel dense take torch's own step. Dampening and
    ``differentiable`` are refused for parameters that travel sparse.

    Args:
        masking: ``"age"`` carries momentum over from the last receipt, faded by μ^a; ``"dgc"`` drops it.
        wire: whom to ask what was received; default: the wire that is attached to each parameter.
    """

    reads_ages = True
    masking: Masking = "age"
    wire: Wire | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        masking: Masking = "age",
        wire: Wire | None = None,
    ) -> None:
        if masking not in get_args(Masking):
            raise ConfigError(f"masking is {masking!r}; expected one of {', '.join(get_args(Masking))}")
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self.masking, self.wire = masking, wire
        # A fused optimizer unscales and skips inside its kernel; ours leaves both to the GradScaler.
        self._step_supports_amp_scaling = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "masking": self.masking, "_step_supports_amp_scaling": False}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the gradients that are there."""
        return _step(self, closure)


@eager
def _step(optimizer: SGD, closure: Callable[[], float] | None) -> float | None:
    loss = evaluate(closure)
    aged = find_aged(optimizer, optimizer.wire)
    with hidden(aged):
        unhooked(torch.optim.SGD.step)(optimizer)
    for one in aged:
        _update(one, optimizer.state, optimizer.masking)
    return loss


def _update(one: Aged, states: dict[Tensor, dict[str, Tensor]], masking: Masking) -> None:
    group, weight = one.group, one.parameter
    if group["dampening"]:
        raise ConfigError(
            f"dampening is {group['dampening']} for a parameter that is sent by a sparsifier; expected 0, since the first "
            "gradient of a coordinate, which torch does not dampen, is not known there"
        )
    at = one.ages.nonzero(as_tuple=True)
    momentum = float(group["momentum"])
    table = _table(momentum, bool(group["nesterov"]), weight.device)
    keep, intake, along_old, along_new, age = table[one.ages[at].long()].unbind(1)
    mean = one.grad[at].float() / age
    if group["maximize"]:
        mean = -mean
    mean += float(group["weight_decay"]) * weight[at].float()
    moved = along_new * mean
    if momentum:
        buffer = _buffer(states, weight)
        old = buffer[at].float() if masking == "age" else torch.zeros_like(mean)
        buffer[at] = (keep * old + intake * mean).to(buffer.dtype)
        moved += along_old * old
    weight[at] -= (float(group["lr"]) * moved).to(weight.dtype)


def _buffer(states: dict[Tensor, dict[str, Tensor]], weight: Tensor) -> Tensor:
    state = states[weight]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(weight)
    return state["momentum_buffer"]


@lru_cache(maxsize=64)
def _table(momentum: float, nesterov: bool, device: torch.device) -> Tensor:
    """For every age: μ^a, (1 − μ^a)/(1 − μ), A, B and a itself, fp32."""
    age = torch.arange(MAX_AGE + 1, dtype=torch.float64)
    keep = momentum**age
    # With μ = 1 nothing fades: the limits of the geometric sums.
    intake = (1 - keep) / (1 - momentum) if momentum != 1 else age
    along_old = momentum * intake
    along_new = (age - along_old) / (1 - momentum) if momentum != 1 else age * (age + 1) / 2
    if nesterov:
        along_old, along_new = momentum * along_old, age + momentum * along_new
    return torch.stack([keep, intake, along_old, along_new, age], dim=1).to(device, torch.float32)
