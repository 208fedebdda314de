"""The gradients of a unit as one flat buffer, without a copy where they already are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.engine.groups import Unit


def flatten(unit: Unit, tensors: Mapping[str, Tensor]) -> Tensor:
    """The unit as one flat fp32 tensor of its own.

    Args:
        tensors: gradients, or whatever else has the shapes of the parameters, by name; a missing one counts as zeros.
    """
    return lay_out(unit, tensors)[0]


def lay_out(
    unit: Unit,
    tensors: Mapping[str, Tensor],
    *,
    in_place: bool = False,
    buffer: Tensor | None = None,
    room: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The unit as one flat fp32 tensor that the exchange may overwrite, and the free memory behind it, if there is any.

    Args:
        tensors: as in ``flatten``.
        in_place: tensors that lie one behind the other in memory may be overwritten instead of copied.
        buffer: where to put them, longer by some room; some may be in their places in it already.
        room: elements to keep free behind a buffer that is made here.
    """
    parts = [tensors.get(tensor.fqn) for tensor in unit.spec.tensors]
    numel = unit.spec.numel
    joined = _neighbours(parts) if in_place and buffer is None else None
    made = joined if buffer is None else buffer
    if made is not None and made.is_cuda:  # on the training stream, and used on this one
        made.record_stream(torch.cuda.current_stream())
    if joined is not None:
        return joined, None
    if buffer is None:
        buffer = memory.empty(numel + room, device=unit.spec.tensors[0].device)
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
        in_place = part is not None and part.dtype == torch.float32 and part.data_ptr() == base + 4 * start
        if part is not None and part.dtype == torch.float32 and not in_place:
            run.append(part.reshape(-1))
        else:
            _copy(run, flat[run_start:start])
            run, run_start = [], start + size
            if not in_place:
                _fill(flat[start : start + size], part)
        start += size
    _copy(run, flat[run_start:start])


def _copy(run: Sequence[Tensor], to: Tensor) -> None:
    if run:
        torch.cat(list(run), out=to)


def _fill(place: Tensor, part: Tensor | None) -> None:
    if part is None:
        place.zero_()
    else:
        place.view(part.shape).copy_(part)


def _neighbours(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts as one tensor without a copy, where they are neighbours in memory.

    So they are if the user zeroes gradients instead of dropping them: the means of a step are views of one buffer, and
    backward then accumulates into them.
    """
    present = [part.detach() for part in parts if part is not None and part.dtype == torch.float32]
    return memory.joined(present) if len(present) == len(parts) else None
