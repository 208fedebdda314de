"""The gradients of a unit as one flat buffer, without a copy where they already are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.engine.groups import Unit


def flatten(
    unit: Unit, tensors: Mapping[str, Tensor], *, in_place: bool = False, buffer: Tensor | None = None
) -> Tensor:
    """The unit as one flat fp32 buffer that the exchange may overwrite.

    Args:
        tensors: gradients, or whatever else has the shapes of the parameters, by name; a missing one counts as zeros.
        in_place: tensors that lie one behind the other in memory may be overwritten instead of copied.
        buffer: where to put them; some may be in their places in it already.
    """
    parts = [tensors.get(tensor.fqn) for tensor in unit.spec.tensors]
    joined = _joined(parts, unit.spec.numel) if in_place and buffer is None else None
    made = joined if buffer is None else buffer
    if made is not None and made.is_cuda:  # on the training stream, and used on this one
        made.record_stream(torch.cuda.current_stream())
    if joined is not None:
        return joined
    flat = memory.empty(unit.spec.numel, device=unit.spec.tensors[0].device) if buffer is None else buffer
    _gather(parts, flat, unit.spec.sizes)
    return flat


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


def _joined(parts: Sequence[Tensor | None], numel: int) -> Tensor | None:
    """The parts as one tensor without a copy, where they are neighbours in memory.

    So they are if the user zeroes gradients instead of dropping them: the means of a step are views of one buffer, and
    backward then accumulates into them.
    """
    first = parts[0]
    if first is None or first.dtype != torch.float32:
        return None
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part is None or not part.is_contiguous() or part.dtype != torch.float32 or part.data_ptr() != end:
            return None
        if part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return first.detach().as_strided((numel,), (1,))
