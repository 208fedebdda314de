"""The gradients of a unit as one flat buffer, without a copy where they already are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.engine.groups import Unit


def flatten(unit: Unit, tensors: Mapping[str, Tensor], *, in_place: bool = False) -> Tensor:
    """The unit as one flat fp32 buffer that the exchange may overwrite.

    Args:
        tensors: gradients, or whatever else has the shapes of the parameters, by name; a missing one counts as zeros.
        in_place: tensors that lie one behind the other in memory may be overwritten instead of copied.
    """
    parts = [tensors.get(tensor.fqn) for tensor in unit.spec.tensors]
    if in_place and (joined := _joined(parts, unit.spec.numel)) is not None:
        if joined.is_cuda:  # made on the training stream, used on this one
            joined.record_stream(torch.cuda.current_stream())
        return joined
    flat = memory.empty(unit.spec.numel, device=unit.spec.tensors[0].device)
    for place, part in zip(flat.split(unit.spec.sizes), parts, strict=True):
        if part is None:
            place.zero_()
        else:
            place.view(part.shape).copy_(part.detach())
    return flat


def _joined(parts: Sequence[Tensor | None], numel: int) -> Tensor | None:
    """The parts as one tensor without a copy, where they are neighbours in memory.

    So they are in the slots of ``engine.slots``, and also if the user zeroes gradients instead of dropping them: the means
    of a step are views of one buffer, and backward then accumulates into them.
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
