"""Signal and noise of a gradient from parts of one batch (McCandlish et al., Large-Batch Training, 2018).

A batch of b samples is cut into K parts; g_i is the gradient of part i and ḡ their mean, the gradient of the batch. With
G the true gradient and Σ the covariance of one sample,

    E‖ḡ‖² = ‖G‖² + tr Σ / b        E‖g_i‖² = ‖G‖² + K tr Σ / b

so tr Σ / b = (mean‖g_i‖² - ‖ḡ‖²) / (K - 1), the noise of one local batch, and ‖G‖² is what remains of ‖ḡ‖².
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.fusion import Noise

PARTS = 4


def measure_noise(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Noise]:
    """Signal and noise of each parameter's gradient over the whole batch; empty if it has fewer than two samples.

    Samples that equal parts leave over are not used; noise falls with the samples, so it is scaled to all of them.
    Gradients are overwritten.
    """
    parts = cut(batch, PARTS) or cut(batch, 2)
    if not parts:
        return {}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    squares = dict.fromkeys(parameters, 0.0)
    for part in parts:
        for parameter in parameters.values():
            parameter.grad = None
        loss(model, part).backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
                squares[name] += float(parameter.grad.float().square().sum())
    count = len(parts)
    used_share = count * samples(parts[0]) / samples(batch)
    found = {
        name: noise_of(float((total.float() / count).square().sum()), squares[name] / count, count)
        for name, total in sums.items()
    }
    return {name: Noise(one.signal_sq, one.noise_sq * used_share) for name, one in found.items()}


def samples(batch: Any) -> int:
    """The length of the first axis of the batch's tensors; 1 if there is none."""
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else [batch]
    lengths = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    return int(lengths[0]) if lengths else 1


def noise_of(mean_sq: float, part_sq: float, parts: int) -> Noise:
    """From ‖ḡ‖² and the mean of ‖g_i‖² over ``parts`` parts; estimates below zero are sampling error and become zero."""
    noise_sq = max(0.0, (part_sq - mean_sq) / (parts - 1))
    return Noise(max(0.0, mean_sq - noise_sq), noise_sq)


def cut(batch: Any, parts: int) -> list[Any]:
    """Equal parts along the first axis of the batch's tensors, without what is left over; empty if it is too short.

    Everything else in a tuple, list or dict goes along with every part.
    """
    if isinstance(batch, Tensor):
        each = batch.shape[0] // parts if batch.dim() else 0
        return list(batch[: each * parts].split(each)) if each else []
    if isinstance(batch, dict):
        columns = _columns(list(batch.values()), parts)
        return [dict(zip(batch, row, strict=True)) for row in columns]
    if isinstance(batch, tuple | list):
        return [type(batch)(row) for row in _columns(list(batch), parts)]
    return []


def _columns(values: list[Any], parts: int) -> list[tuple[Any, ...]]:
    lengths = {value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()}
    if len(lengths) != 1:
        return []
    cuts = [cut(v, parts) if isinstance(v, Tensor) and v.dim() else [v] * parts for v in values]
    return list(zip(*cuts, strict=True)) if all(cuts) else []
