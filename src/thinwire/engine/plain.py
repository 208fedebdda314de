"""Data parallelism for a plain ``nn.Module``: gradients are averaged while backward is still running.

Gradients arrive through post-accumulate hooks and go straight into a transaction. The end of backward waits for it: after
``loss.backward()`` every gradient is the mean over the ranks, as with DDP.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinwire.comm.objects import broadcast_tensors
from thinwire.core import ConfigError
from thinwire.engine.base import Gradients
from thinwire.engine.hooks import Hook
from thinwire.engine.target import Target
from thinwire.engine.views import averaged_form
from thinwire.exchange.transaction import Outcome, Transaction

log = logging.getLogger(__name__)
_attached: WeakSet[nn.Module] = WeakSet()


def _on_grad(engine: weakref.ref[PlainEngine], name: str, parameter: Tensor) -> None:
    """A hook that does not keep its engine: autograd holds it where the garbage collector cannot see the cycle.

    The hooks on the module keep the engine, so it lives as long as the module does.
    """
    found = engine()
    if found is not None:
        found.on_grad(name, parameter)


class PlainEngine:
    """Hooks on the parameters and on the output of a module.

    Args:
        broadcast_buffers: rank 0's buffers (BatchNorm statistics) are given to all before each training forward, as DDP does.
    """

    exchanging = True

    def __init__(self, target: Target, gradients: Gradients, *, broadcast_buffers: bool) -> None:
        module = self._module = target.module
        if module in _attached:
            raise ConfigError("this module already has thinwire attached; detach() that first")
        self._target, self._gradients, self._parameters = target, gradients, target.parameters
        self._link = gradients.channel.members.link()
        # Where loops written for DDP switch synchronisation off; torch.compile keeps the attributes of what it wraps.
        self._switches = [one.__dict__ for one in (module, getattr(module, "_orig_mod", module))]
        self._syncing = True
        self._reset()
        self._refuse_stepping_hooks(own=0)
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(_on_grad, weakref.ref(self), name))
            for name, parameter in self._parameters.items()
        ]
        self._handles.append(module.register_forward_pre_hook(Hook(self._before_forward)))
        self._handles.append(module.register_forward_hook(Hook(self._after_forward)))
        broadcast_tensors(self._link, [*module.parameters(), *module.buffers()])  # all start from rank 0's values
        self._buffers = [b for b in module.buffers() if b.is_floating_point()] if broadcast_buffers else []
        _attached.add(module)
        if target.sparse:
            log.warning("%s: sparse gradients are averaged as dense ones", ", ".join(sorted(target.sparse)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one after it averages the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def detach(self) -> None:
        """Remove all hooks."""
        _attached.discard(self._module)
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._transaction: Transaction | None = None
        self._in_backward = False
        self._accumulated: set[str] = set()

    def _is_syncing(self) -> bool:
        wanted = all(one.get("require_backward_grad_sync", True) for one in self._switches)
        return self.exchanging and self._syncing and wanted

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing computes a part of the model once more, inside backward
        if self._in_backward or self._transaction:
            self._abandon()
        if torch.is_grad_enabled():
            self._gradients.drop_discarded()
        if self._buffers and module.training and self._is_syncing():
            broadcast_tensors(self._link, self._buffers)

    def _abandon(self) -> None:
        """The backward pass before this forward raised. The other ranks wait for its transaction: abort it on all."""
        transaction = self._transaction
        self._reset()
        if transaction is not None:
            transaction.abort()
            self._gradients.finish(transaction)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        """The end of backward is asked for from the output: that hook fires in the outermost pass.

        With reentrant checkpointing gradients come from nested passes, each with an end of its own; asked for from a
        gradient, every checkpointed block would be a transaction.
        """
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(Hook(self._begin_backward))

    def _begin_backward(self, _: object = None) -> None:
        if not self._in_backward:
            self._in_backward = True
            # Runs when the whole backward pass is over; DDP and FSDP rely on the same callback.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def on_grad(self, name: str, parameter: Tensor) -> None:
        """A gradient is ready."""
        if not self._is_syncing():
            if self.exchanging:
                self._accumulated.add(name)
            return
        self._begin_backward()  # where the loss does not come from the module's own output
        if self._transaction is None:
            self._target.check_unchanged()
            self._refuse_stepping_hooks(own=1)
            self._transaction = self._gradients.begin()
        elif name in self._transaction.added:
            raise ConfigError(
                f"the gradient of {name} was ready twice in one backward pass; use non-reentrant activation "
                "checkpointing (use_reentrant=False) or wrap all backward passes but the last in wire.no_sync(). If the "
                "backward pass before this one was interrupted by an error, detach() and attach() again on all ranks"
            )
        gradient = parameter.grad
        assert gradient is not None
        placed = self._transaction.add(name, averaged_form(gradient))
        if placed.shape == gradient.shape and not gradient.is_sparse:
            parameter.grad = placed  # the memory that autograd took is free

    def _end_backward(self) -> None:
        transaction, accumulated = self._transaction, self._accumulated
        self._transaction, self._in_backward = None, False
        if transaction is None:
            return  # nothing to average: gradients of something else, or under no_sync
        self._accumulated = set()
        # What passes under no_sync have left takes part, also where this last pass did not touch it.
        for name in sorted(accumulated - transaction.added.keys()):
            gradient = self._parameters[name].grad
            if gradient is not None:
                transaction.add(name, averaged_form(gradient))
        self._gradients.close(transaction)
        outcome = self._gradients.finish(transaction)
        # A tensor that no rank used keeps its (missing) gradient. An aborted step leaves NaN, for scalers to see.
        for name in outcome.used:
            self._parameters[name].grad = self._mean(name, outcome)

    def _mean(self, name: str, outcome: Outcome) -> Tensor:
        parameter = self._parameters[name]
        if not outcome.committed:
            return torch.full_like(parameter, float("nan"))
        mean = outcome.means[name]
        if parameter.is_complex():
            # A complex number must not begin in the middle of another.
            return torch.view_as_complex(mean if mean.storage_offset() % 2 == 0 else mean.clone())
        return mean.to_sparse(1) if name in self._target.sparse else mean

    def _refuse_stepping_hooks(self, own: int) -> None:
        """An optimizer inside backward would step on gradients that are not averaged yet, and replicas would diverge.

        Args:
            own: hooks that are thinwire's.
        """
        for name, parameter in self._parameters.items():
            if len(parameter._post_accumulate_grad_hooks or ()) > own:
                raise ConfigError(
                    f"{name} has another post-accumulate-grad hook, which sees gradients before they are averaged; step "
                    "the optimizer after backward, and use Tensor.register_hook to look at gradients"
                )
