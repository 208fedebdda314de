"""Where gradients gather: each unit has one flat buffer, and a large gradient is put into its place as soon as it is ready.

It has just been computed, so it is still in the processor's cache: copying it now costs a fraction of what it costs
later, and the memory that autograd had taken for it is free for the next layer. DDP does the same with its buckets. Small
ones stay where they are until their unit is complete: a call per tensor would cost the training thread more than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.engine.groups import Group, Unit

SMALL_ELEMS = 1 << 16


class Slots:
    """The places of a step's gradients.

    Args:
        room: elements to keep free behind the last place of each buffer.
    """

    def __init__(self, room: int = 0) -> None:
        self._room = room
        self._pool = memory.Pool()
        self._unit_of: dict[str, tuple[Unit, int]] = {}
        self._slots: dict[Unit, tuple[Tensor, ...]] = {}
        self.buffers: dict[Unit, Tensor] = {}  # of the units of which something is in its place

    def use(self, groups: Sequence[Group]) -> None:
        """The fusion groups from now on."""
        units = [unit for group in groups for unit in group.units]
        self._unit_of = {tensor.fqn: (unit, i) for unit in units for i, tensor in enumerate(unit.spec.tensors)}
        self.clear()

    def put(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in its place.

        What is small or not fp32 stays where it is; so does a view of something larger, which may be a place of the step
        before that was zeroed and accumulated into again.
        """
        if gradient.numel() <= SMALL_ELEMS:
            return gradient
        if gradient.dtype != torch.float32 or gradient.untyped_storage().nbytes() > gradient.nbytes:
            return gradient
        unit, index = self._unit_of[name]
        if unit not in self._slots:
            with memory.recycling(self._pool):
                whole = memory.empty(unit.spec.numel + self._room, device=gradient.device)
            self.buffers[unit] = whole
            self._slots[unit] = whole[: unit.spec.numel].split(unit.spec.sizes)
        return self._slots[unit][index].view(gradient.shape).copy_(gradient.detach())

    def clear(self) -> None:
        """The step is over: its buffers belong to the exchanges and to the gradients now."""
        self._slots, self.buffers = {}, {}
        self._pool.end_step()
