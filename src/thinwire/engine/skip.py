"""No optimizer steps on an aborted transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from thinwire.engine.base import Gradients

log = logging.getLogger(__name__)


class SkipAborted:
    """Drops the gradients of an aborted step before its optimizer sees them.

    Optimizers pass over parameters without gradient, so weights and moments stay as they were.
    """

    def __init__(self, gradients: Gradients, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._gradients = gradients
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        last = self._gradients.last
        if last is not None and not last.committed:
            log.warning("step %d skipped on all ranks: a gradient was NaN or Inf on some rank", last.index)
            optimizer.zero_grad(set_to_none=True)
