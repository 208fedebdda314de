"""``LayerScaler`` for several ranks: the moments are combined over a process group, so that all scale alike."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.amp.layer_scaler import LayerScaler


def layer_scaler(model: nn.Module, *, group: dist.ProcessGroup | None = None, **settings: Any) -> LayerScaler:
    """A ``LayerScaler`` whose ranks agree, if torch.distributed is initialised; all ranks call ``update`` together.

    Args:
        group: over which ranks; default: all.
        settings: as for ``thinwire.amp.LayerScaler``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return LayerScaler(model, **settings)
    device = next(model.parameters()).device
    operators = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

    def reduce(tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        moved = tensor.to(device)
        dist.all_reduce(moved, operators[op], group=group)
        return moved.cpu()

    return LayerScaler(model, reduce=reduce, **settings)
