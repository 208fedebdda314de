"""Data parallelism for a plain ``nn.Module``: gradients are averaged while backward is still running.

Gradients arrive through post-accumulate hooks; a group is submitted as soon as all its gradients are there *and* all groups
before it were submitted, so the order is the same on all ranks. The end of backward waits for the last group: after
``loss.backward()`` every gradient is the mean over the ranks, as with DDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.core import Broadcast, ConfigError, TensorSpec
from thinwire.engine.groups import Group
from thinwire.engine.session import Session


class PlainEngine:
    """Hooks on the parameters of ``module``.

    Args:
        parameters: the ones to average, by name.
        groups: fusion groups in the order in which their gradients are expected.
        broadcast_buffers: rank 0's buffers (BatchNorm statistics) are given to all before each training forward, as DDP does.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        groups: list[Group],
        session: Session,
        *,
        broadcast_buffers: bool,
    ) -> None:
        self.session = session
        self._parameters, self._groups = parameters, groups
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._group_of = {t.fqn: index for index, group in enumerate(groups) for t in group.tensors}
        self._syncing = True
        self._in_backward = False
        self._reset()
        self._handles = [p.register_post_accumulate_grad_hook(self._ready_hook(name)) for name, p in parameters.items()]
        self._share_start_values(module)
        self._buffers = [b for b in module.buffers() if b.is_floating_point()] if broadcast_buffers else []
        if self._buffers:
            self._handles.append(module.register_forward_pre_hook(self._share_buffers))

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
        for handle in self._handles:
            handle.remove()

    def _reset(self) -> None:
        self._missing = [len(group.tensors) for group in self._groups]
        self._next_group = 0
        self._ready: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}

    def _ready_hook(self, name: str):  # type: ignore[no-untyped-def]  # torch's own hook type is private
        def hook(parameter: nn.Parameter) -> None:
            self._on_ready(name, parameter)

        return hook

    def _on_ready(self, name: str, parameter: nn.Parameter) -> None:
        if not self._syncing:
            return
        if not self._in_backward:
            self._in_backward = True
            # Runs when the whole backward pass is over; DDP and FSDP rely on the same callback.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if name in self._ready:
            raise ConfigError(
                f"the gradient of {name} was ready twice in one backward pass; use non-reentrant activation "
                "checkpointing (use_reentrant=False) or wrap all backward passes but the last in wire.no_sync()"
            )
        self.session.meter.gradient_ready(name)
        assert parameter.grad is not None
        self._ready[name] = parameter.grad
        self._missing[self._group_of[name]] -= 1
        while self._next_group < len(self._groups) and self._missing[self._next_group] == 0:
            self._submit_next()

    def _submit_next(self) -> None:
        group = self._groups[self._next_group]
        gradients = {t.fqn: self._ready[t.fqn] for t in group.tensors if t.fqn in self._ready}
        self.session.submit(group, gradients, self._write)
        self._next_group += 1

    def _write(self, tensor: TensorSpec, mean: Tensor) -> None:
        """Means are views of their unit's buffer; they become the gradients at the end of the step, without a copy."""
        self._received[tensor.fqn] = mean.to(tensor.dtype)

    def _end_backward(self) -> None:
        try:
            self._check_frozen()
            while self._next_group < len(self._groups):
                self._submit_next()
            self.session.meter.backward_ended()
            used = torch.tensor([name in self._ready for name in self._parameters], dtype=torch.uint8)
            self.session.wait(self.session.end_step(used, self._finish))
            self.session.end_books()
        finally:
            self._in_backward = False
            self._reset()

    def _finish(self, counts: bool, used: Tensor) -> None:
        """Parameters that no rank used keep their (missing) gradient; a skipped step leaves NaN, for scalers to see."""
        for (name, parameter), was_used in zip(self._parameters.items(), used.tolist(), strict=True):
            if was_used:
                parameter.grad = self._received[name] if counts else torch.full_like(parameter, float("nan"))

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when thinwire was attached and now requires gradients, which nobody averages; "
                    "detach() and attach() again after unfreezing"
                )

    def _share_start_values(self, module: nn.Module) -> None:
        """All ranks start from rank 0's parameters and buffers, as with DDP."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                self._broadcast(tensor)

    def _share_buffers(self, module: nn.Module, _: object) -> None:
        if module.training and self._syncing and not self._in_backward:
            with torch.no_grad():
                for buffer in self._buffers:
                    self._broadcast(buffer)

    def _broadcast(self, tensor: Tensor) -> None:
        """As bytes: every dtype travels, on every backend."""
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            got = self.session.ask(Broadcast(flat.view(torch.uint8)))
            tensor.copy_(got.view(tensor.dtype).view(tensor.shape))
