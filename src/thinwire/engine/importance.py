"""How much a unit of gradient matters to the optimizer, coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.engine.flat import flatten
from thinwire.engine.groups import Unit

_FLOOR = 0.1  # of the mean deviation: coordinates that hardly ever had a gradient must not crowd out all others


def importance(unit: Unit, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> Tensor | None:
    """(√v + √v̄/10)^(-1/2) with Adam's second moment v, flat; None where the optimizer has none (yet) for some tensor.

    Adam makes a step of g/√v out of a gradient g. Ranking by |g|/√v itself would treat pure noise like signal, ranking by
    |g| leaves weights with small gradients waiting; half way in between trains best (docs/optimizers.md).
    """
    if optimizer is None:
        return None
    states = {tensor.fqn: optimizer.state.get(parameters[tensor.fqn], {}) for tensor in unit.spec.tensors}
    moments = {name: state["exp_avg_sq"] for name, state in states.items() if "exp_avg_sq" in state}
    if len(moments) < len(states):
        return None
    flat = flatten(unit, moments).sqrt_()
    for part in flat.split(unit.spec.sizes):
        part.add_(_FLOOR * part.mean() + torch.finfo(torch.float32).tiny)
    return flat.rsqrt_()
