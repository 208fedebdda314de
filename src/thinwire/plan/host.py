"""What selecting on the host costs: the measurement that SSFusion's host offload needs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from thinwire.core import Compressor, Step, TensorSpec, UnitSpec
from thinwire.fusion import Curve
from thinwire.wrappers.host import OnHost

_SAMPLED_TENSORS = 6
_REPEATS = 3


def host_curve(tensors: Sequence[TensorSpec], compressor: Compressor) -> Curve:
    """Seconds to bring a tensor of so many elements to the host and to have its first message ready there."""
    by_size = sorted(tensors, key=lambda tensor: tensor.numel)
    stride = max(1, len(by_size) // _SAMPLED_TENSORS)
    return Curve.fit(
        (tensor.numel, _first_message_s(tensor, compressor)) for tensor in by_size[::stride] for _ in range(_REPEATS)
    )


def _first_message_s(tensor: TensorSpec, compressor: Compressor) -> float:
    hosted, unit = OnHost(inner=compressor.route(tensor)), UnitSpec((tensor,))
    x, state = torch.randn(tensor.numel, device=tensor.device), hosted.init(unit)
    started_s = time.perf_counter()
    exchange = hosted.exchange(x, state, Step(0, unit))
    next(exchange)
    taken_s = time.perf_counter() - started_s
    exchange.close()
    return taken_s
