"""A prototype: training without the barrier at the end of backward, to measure whether priority would pay.

``backward()`` returns while messages are still under way. Before a layer's forward, what is missing of its gradients is
waited for and its part of the optimizer steps. Only then can it matter which message goes first. It is no product: gradients
cannot be clipped, a step cannot be skipped, and nobody may look at a gradient between ``backward()`` and the next forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from thinwire.core import TensorSpec
from thinwire.engine.groups import Group
from thinwire.engine.plain import PlainEngine
from thinwire.engine.regroup import Regrouping
from thinwire.engine.session import Session

ARRIVAL_TIMEOUT_S = 120.0
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def urgent_first(ready_s: Sequence[float], wire_s: Sequence[float]) -> list[int]:
    """The order of messages if the wire, whenever it is free, takes the most urgent of those that are ready.

    A function of the expected times alone: all ranks that know these use the same order, whatever becomes ready first.

    Args:
        ready_s: when each group is ready, in that order; the last one is needed first.
    """
    waiting, order, free_s = set(range(len(ready_s))), [], 0.0
    while waiting:
        ready = [index for index in waiting if ready_s[index] <= free_s]
        if not ready:
            free_s = min(ready_s[index] for index in waiting)
            continue
        order.append(max(ready))
        waiting.discard(order[-1])
        free_s += wire_s[order[-1]]
    return order


class WithoutBarrier(PlainEngine):
    """Averages gradients like the plain engine, but applies them layer by layer inside the next forward."""

    def __init__(
        self, module: nn.Module, regrouping: Regrouping, session: Session, make_optimizer: MakeOptimizer
    ) -> None:
        parameters = dict(module.named_parameters())
        super().__init__(module, parameters, regrouping, session, broadcast_buffers=False)
        self.groups = regrouping.groups()  # in order of readiness
        self._use(self.groups, make_optimizer)
        self._under_way = False
        for layer in module.modules():
            names = [name for name, p in parameters.items() if any(p is own for own in layer.parameters(recurse=False))]
            if names:
                self._handles.append(layer.register_forward_pre_hook(self._before_forward(names)))

    def _use(self, groups: list[Group], make_optimizer: MakeOptimizer) -> None:
        self._group_of = {tensor.fqn: index for index, group in enumerate(groups) for tensor in group.tensors}
        self._left = [0] * len(groups)
        self._arrived = [threading.Event() for _ in groups]
        self._waiting: set[int] = set()
        self._members = [[tensor.fqn for tensor in group.tensors] for group in groups]
        self._optimizers = [make_optimizer([self._parameters[name] for name in names]) for names in self._members]

    def reorder(self, order: Sequence[int]) -> None:
        """Send the groups in this order from now on."""
        self.finish()
        self.queue.use([self.groups[index] for index in order])

    def finish(self) -> None:
        """Apply what is still under way."""
        for group in sorted(self._waiting):
            self._apply(group)
        self._end_exchange()

    def _before_forward(self, names: list[str]) -> Callable[[nn.Module, object], None]:
        groups = sorted({self._group_of[name] for name in names})

        def hook(_: nn.Module, __: object) -> None:
            for group in groups:
                if group in self._waiting:
                    self._apply(group)

        return hook

    def _apply(self, group: int) -> None:
        if not self._arrived[group].wait(ARRIVAL_TIMEOUT_S):
            raise TimeoutError(f"the gradients of group {group} did not arrive within {ARRIVAL_TIMEOUT_S} s")
        self._waiting.discard(group)
        for name in self._members[group]:
            self._parameters[name].grad = self._received[name]
        self._optimizers[group].step()
        for name in self._members[group]:
            self._parameters[name].grad = None

    def _end_exchange(self) -> None:
        if self._under_way:
            self._under_way = False
            self.session.wait(self._ticket)
            self.queue.end_step()
            self._reset()

    def _on_ready(self, name: str, parameter: nn.Parameter) -> None:
        if not self._in_backward:
            self._end_exchange()
            self._left = [len(names) for names in self._members]
            for event in self._arrived:
                event.clear()
        super()._on_ready(name, parameter)

    def _write(self, tensor: TensorSpec, mean: Tensor) -> None:
        super()._write(tensor, mean)
        group = self._group_of[tensor.fqn]
        self._left[group] -= 1
        if self._left[group] == 0:
            self._arrived[group].set()

    def _end_backward(self) -> None:
        self.queue.submit_rest()
        used = [name in self.queue.ready for name in self._parameters]
        self._ticket = self.session.end_step(used, lambda counts, used: None)
        self._waiting = set(range(len(self._members)))
        self._under_way, self._in_backward = True, False
