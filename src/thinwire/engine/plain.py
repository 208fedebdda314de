"""Data parallelism for a plain ``nn.Module``: gradients are averaged while backward is still running.

Gradients arrive through post-accumulate hooks; a group is submitted as soon as all its gradients are there *and* all groups
before it were submitted, so the order is the same on all ranks. The end of backward waits for the last group: after
``loss.backward()`` every gradient is the mean over the ranks, as with DDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from thinwire.core import ConfigError, TensorSpec
from thinwire.engine.group_queue import GroupQueue, Steering
from thinwire.engine.session import Session
from thinwire.engine.sharing import share

_attached: WeakSet[nn.Module] = WeakSet()


class PlainEngine:
    """Hooks on the parameters of ``module``.

    Args:
        parameters: the ones to average, by name.
        steering: the fusion groups, and when they change.
        broadcast_buffers: rank 0's buffers (BatchNorm statistics) are given to all before each training forward, as DDP does.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        steering: Steering,
        session: Session,
        *,
        broadcast_buffers: bool,
    ) -> None:
        if module in _attached:
            raise ConfigError("this module already has thinwire attached; detach() that first")
        self.session = session
        self._module = module
        self._parameters = parameters
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._syncing = True
        self._in_backward = False
        self.queue = GroupQueue(session, steering, self._write, self._used, in_place=True)
        self._reset()
        self._handles = [p.register_post_accumulate_grad_hook(self._ready_hook(name)) for name, p in parameters.items()]
        share([*module.parameters(), *module.buffers()], session)  # all start from rank 0's values, as with DDP
        self._buffers = [b for b in module.buffers() if b.is_floating_point()] if broadcast_buffers else []
        if self._buffers:
            self._handles.append(module.register_forward_pre_hook(self._share_buffers))
        _attached.add(module)

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
        self.queue.clear()
        self._accumulated: set[str] = set()
        self._received: dict[str, Tensor] = {}

    def _ready_hook(self, name: str):  # type: ignore[no-untyped-def]  # torch's own hook type is private
        def hook(parameter: nn.Parameter) -> None:
            self._on_ready(name, parameter)

        return hook

    def _on_ready(self, name: str, parameter: nn.Parameter) -> None:
        if not self._syncing:
            self._accumulated.add(name)
            return
        if not self._in_backward:
            self._in_backward = True
            # Runs when the whole backward pass is over; DDP and FSDP rely on the same callback.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if name in self.queue.ready:
            raise ConfigError(
                f"the gradient of {name} was ready twice in one backward pass; use non-reentrant activation "
                "checkpointing (use_reentrant=False) or wrap all backward passes but the last in wire.no_sync(). If the "
                "backward pass before this one was interrupted by an error, detach() and attach() again on all ranks"
            )
        gradient = parameter.grad
        assert gradient is not None
        placed = self.queue.place(name, gradient)
        if placed is not gradient:
            parameter.grad = placed
        self.queue.add(name, placed)

    def _write(self, tensor: TensorSpec, mean: Tensor) -> None:
        """Means are views of their unit's buffer; they become the gradients at the end of the step, without a copy."""
        self._received[tensor.fqn] = mean if mean.dtype is tensor.dtype else mean.to(tensor.dtype)

    def _used(self) -> list[bool]:
        return [name in self.queue.ready for name in self._parameters]

    def _end_backward(self) -> None:
        try:
            self._check_frozen()
            self._add_accumulated()
            self.queue.submit_rest()
            self.session.wait(self.session.end_step(self._finish))
            self.queue.end_step()
        finally:
            self._in_backward = False
            self._reset()

    def _add_accumulated(self) -> None:
        """What earlier passes under ``no_sync`` have left takes part, also where this last pass did not touch it."""
        for name in self._accumulated - self.queue.ready.keys():
            gradient = self._parameters[name].grad
            if gradient is not None:
                self.queue.add(name, gradient)

    def _finish(self, counts: bool, used: list[bool]) -> None:
        """Parameters that no rank used keep their (missing) gradient; a skipped step leaves NaN, for scalers to see."""
        for (name, parameter), was_used in zip(self._parameters.items(), used, strict=True):
            if was_used:
                parameter.grad = self._received[name] if counts else torch.full_like(parameter, float("nan"))

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when thinwire was attached and now requires gradients, which nobody averages; "
                    "detach() and attach() again after unfreezing"
                )

    def _share_buffers(self, module: nn.Module, _: object) -> None:
        if module.training and self._syncing and not self._in_backward:
            share(self._buffers, self.session)
