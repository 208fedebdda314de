"""What both optimizers share: which parameters have ages, and torch's own step for all the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from thinwire.core import ConfigError
from thinwire.engine.ages import Wire, wire_of

# A compiled training step breaks its graph where ages are read, from memory that it does not know. The public
# torch.compiler.disable does the same, but takes a second at import.
eager = _disable_dynamo

_MODES = ("differentiable", "capturable")  # both want the step on a tape or in a graph, where no age can be read


class Aged(NamedTuple):
    """A parameter that has received only some of its coordinates, and its gradient."""

    group: dict[str, Any]
    parameter: Tensor
    grad: Tensor
    ages: Tensor


def find_aged(optimizer: torch.optim.Optimizer, wire: Wire | None) -> list[Aged]:
    """The parameters of which the wire says that not all was received, or that it was older than one step.

    Args:
        wire: the one to ask; None: every parameter's own.

    Raises:
        ConfigError: such a parameter is complex, or its group wants a mode that has no meaning for it.
    """
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            responsible = wire_of(parameter) if wire is None else wire
            if parameter.grad is None or responsible is None:
                continue
            received = responsible.received(parameter)
            if received is not None:
                _check(group, parameter)
                found.append(Aged(group, parameter, parameter.grad, received.ages))
    return found


def _check(group: dict[str, Any], parameter: Tensor) -> None:
    modes = [mode for mode in _MODES if group.get(mode)]
    if modes:
        raise ConfigError(
            f"{modes[0]}=True does not go together with a parameter that is sent by a sparsifier; leave it out, or attach "
            "with a compressor that sends everything, for example compress='int4'"
        )
    if parameter.is_complex():
        raise ConfigError(f"a sparsifier sends a parameter of {parameter.dtype}; expected real numbers")


@contextmanager
def hidden(aged: list[Aged]) -> Iterator[None]:
    """Inside, the aged parameters have no gradient, so that torch's step passes over them."""
    for one in aged:
        one.parameter.grad = None
    try:
        yield
    finally:
        for one in aged:
            one.parameter.grad = one.grad


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's step without the hooks that torch has put around it: they have run around ours already."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def evaluate(closure: Callable[[], float] | None) -> float | None:
    """The loss, where a closure is given; it computes the gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
