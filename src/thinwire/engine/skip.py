"""No optimizer steps on an aborted transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from thinwire.engine.base import Gradients

log = logging.getLogger(__name__)


class SkipAborted:
    """Makes the step of an optimizer do nothing after an aborted transaction, whatever the optimizer.

    Most pass over parameters without gradient; some (Muon) take a missing gradient for zeros and move weights all the same.
    So for the length of the step the optimizer has no parameters.
    """

    def __init__(self, gradients: Gradients, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._gradients = gradients
        self._taken: dict[int, list[Any]] = {}  # by optimizer, the parameters of its groups
        self._warned = -1
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._after_step(optimizer, args, kwargs)  # a step that raised has left it without parameters
        last = self._gradients.last
        if last is None or last.committed:
            return
        if self._warned != last.index:
            self._warned = last.index
            log.warning("step %d skipped on all ranks: a gradient was NaN or Inf on some rank", last.index)
        optimizer.zero_grad(set_to_none=True)
        self._taken[id(optimizer)] = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, params in zip(optimizer.param_groups, self._taken.pop(id(optimizer), []), strict=False):
            group["params"] = params
