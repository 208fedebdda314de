"""What the tests of the optimizers share: a wire that is told what was received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import thinwire.api  # noqa: F401  (registers the compressors)
from thinwire.core import TensorSpec
from thinwire.engine.ages import Ages
from thinwire.fusion.prepare import prepare

SHAPES = ((40, 50), (1500,), (33, 40))  # the vector travels dense


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """Parameters with the same values for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def ages_of(given: Sequence[Tensor], compress: str = "topk(density=0.1)") -> Ages:
    """A wire for these parameters."""
    named = {f"p{index}": parameter for index, parameter in enumerate(given)}
    tensors = [TensorSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
    return Ages(named, tensors, prepare(compress))


def receive(given: Sequence[Tensor], step: int, share: float = 0.2, ages: Ages | None = None) -> None:
    """Give all parameters a gradient of which (but for the dense one) only a share has arrived, and say so."""
    generator = torch.Generator().manual_seed(1000 + step)
    means = {}
    for index, parameter in enumerate(given):
        mean = torch.randn(parameter.shape, generator=generator)
        came = torch.rand(parameter.shape, generator=generator) < (share if parameter.dim() > 1 else 1.0)
        parameter.grad = torch.where(came, mean, 0.0).to(parameter.dtype)
        means[f"p{index}"] = parameter.grad.float()
    if ages is not None:
        ages.end_step(means)
