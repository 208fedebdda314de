"""No optimizer steps on an aborted transaction, nor, where gradients stay local, on gradients that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from thinwire import kernels
from thinwire.engine.base import Gradients

log = logging.getLogger(__name__)


class SkipAborted:
    """Makes the step of an optimizer do nothing after an aborted transaction, whatever the optimizer.

    Most pass over parameters without gradient; some (Muon) take a missing gradient for zeros and move weights all the same.
    So for the length of the step the optimizer has no parameters.

    Args:
        is_local: whether gradients stay on this rank at present. It then decides for itself, and skips the step alone.

    Attributes:
        skipped: what was decided for the last training step.
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizers: Iterable[torch.optim.Optimizer],
        is_local: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gradients, self._is_local = gradients, is_local
        self.skipped = False
        self._decided: set[int] = set()  # optimizers that have followed the present decision
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
        if not self._decided or id(optimizer) in self._decided:
            # Once for all optimizers of a step: the first one drops its gradients, and the others must follow it.
            self.skipped, self._decided = self._skip_alone() if self._is_local() else self._skip_together(), set()
        self._decided.add(id(optimizer))
        if not self.skipped:
            return
        optimizer.zero_grad(set_to_none=True)
        self._taken[id(optimizer)] = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []

    def _skip_together(self) -> bool:
        last = self._gradients.last
        if last is None or last.committed:
            return False
        if self._warned != last.index:
            self._warned = last.index
            log.warning("step %d skipped on all ranks: a gradient was NaN or Inf on some rank", last.index)
        return True

    def _skip_alone(self) -> bool:
        gradients = [p.grad for p in self._gradients.parameters.values() if p.grad is not None]
        if all(_is_finite(gradient) for gradient in gradients):
            return False
        log.warning("step skipped on this rank alone: a gradient was NaN or Inf")
        return True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, params in zip(optimizer.param_groups, self._taken.pop(id(optimizer), []), strict=False):
            group["params"] = params


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    if values.dtype is torch.float32 and values.is_contiguous():
        return kernels.all_finite(values.view(-1))
    return bool(values.isfinite().all())
