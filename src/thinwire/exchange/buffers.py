"""The tensors of a unit as one flat buffer: where each has its place, and no copy where it lies there already.

A large tensor is copied into its place as soon as it is added: it has just been computed, so it is still in the processor's
cache, and copying it later costs several times as much; the memory that autograd took for it is free for the next layer.
DDP does the same with its buckets. Small ones stay where they are until their unit is complete: a call per tensor would cost
the training thread more than the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.fusion.groups import Unit

SMALL_ELEMS = 1 << 16
PlaceOf = Mapping[str, tuple[Unit, int]]  # by tensor name: its unit, and its number there


class Places:
    """The buffers of one transaction, made as they are needed. Belongs to the training thread.

    Args:
        padding: elements to keep free behind the last place of each buffer.

    Attributes:
        buffers: of the units of which something is in its place.
    """

    def __init__(self, place_of: PlaceOf, padding: int, pool: memory.Pool) -> None:
        self._place_of, self._padding, self._pool = place_of, padding, pool
        self._places: dict[Unit, tuple[Tensor, ...]] = {}
        self.buffers: dict[Unit, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in its place.

        What is small or not fp32 stays where it is; so does a view of something larger, which may be a place of the
        transaction before that was zeroed and accumulated into again.
        """
        if tensor.numel() <= SMALL_ELEMS:
            return tensor
        if tensor.dtype != torch.float32 or tensor.untyped_storage().nbytes() > tensor.nbytes:
            return tensor
        unit, index = self._place_of[name]
        if unit not in self._places:
            with memory.recycling(self._pool):
                whole = memory.empty(unit.spec.numel + self._padding, device=tensor.device)
            self.buffers[unit] = whole
            self._places[unit] = whole[: unit.spec.numel].split(unit.spec.sizes)
        return self._places[unit][index].view(tensor.shape).copy_(tensor.detach())


def flatten(unit: Unit, tensors: Mapping[str, Tensor]) -> Tensor:
    """The unit as one flat fp32 tensor of its own.

    Args:
        tensors: whatever has the shapes of the unit's tensors, by name; a missing one counts as zeros.
    """
    return lay_out(unit, tensors)[0]


def lay_out(
    unit: Unit,
    tensors: Mapping[str, Tensor],
    *,
    in_place: bool = False,
    buffer: Tensor | None = None,
    padding: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The unit as one flat tensor that the exchange may overwrite, and the free memory behind it, if there is any.

    Args:
        tensors: as in ``flatten``.
        in_place: tensors that lie one behind the other in memory may be overwritten instead of copied.
        buffer: of ``Places``; some tensors may be in their places in it already.
        padding: elements to keep free behind a buffer that is made here.
    """
    parts = [tensors.get(tensor.fqn) for tensor in unit.spec.tensors]
    numel, dtype = unit.spec.numel, unit.compressor.dtype
    joined = _neighbours(parts, dtype) if in_place and buffer is None else None
    made = joined if buffer is None else buffer
    if made is not None and made.is_cuda:  # made on the training stream, and used on this one
        made.record_stream(torch.cuda.current_stream())
    if joined is not None:
        return joined, None
    if buffer is None:
        buffer = memory.empty(numel + padding, dtype, unit.spec.tensors[0].device)
    flat = buffer[:numel]
    _gather(parts, flat, unit.spec.sizes)
    return flat, buffer[numel:]


@torch.no_grad()
def _gather(parts: Sequence[Tensor | None], flat: Tensor, sizes: Sequence[int]) -> None:
    """Copy what is not in its place yet: neighbours in one call, because calls cost more than small copies."""
    run: list[Tensor] = []
    start = run_start = 0
    base = flat.data_ptr()
    for part, size in zip(parts, sizes, strict=True):
        fits = part is not None and part.dtype is flat.dtype
        in_place = fits and part is not None and part.data_ptr() == base + flat.itemsize * start
        if fits and part is not None and not in_place:
            run.append(part.reshape(-1))
        else:
            _copy(run, flat[run_start:start])
            run, run_start = [], start + size
            if part is None:
                flat[start : start + size].zero_()
            elif not in_place:
                flat[start : start + size].view(part.shape).copy_(part)
        start += size
    _copy(run, flat[run_start:start])


def _copy(run: Sequence[Tensor], to: Tensor) -> None:
    if run:
        torch.cat(list(run), out=to)


def _neighbours(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """The parts as one tensor without a copy, where they are neighbours in memory.

    So they are if the user zeroes gradients instead of dropping them: the means of a step are views of one buffer, and
    backward then accumulates into them.
    """
    present = [part.detach() for part in parts if part is not None and part.dtype is dtype]
    return memory.joined(present) if len(present) == len(parts) else None
