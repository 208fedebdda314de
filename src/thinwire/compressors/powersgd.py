"""PowerSGD: Vogels et al., Practical Low-Rank Gradient Compression for Distributed Optimization (NeurIPS'19)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import (
    AllReduce,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Role,
    State,
    Step,
    TensorSpec,
    UnitSpec,
    register,
)


@register("powersgd")
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """One warm-started power iteration per step: the mean gradient M (n × m) is sent as P (n × r) and Q (m × r).

    P = mean(M Q); P̂ = orthonormal basis of P; Q = mean(Mᵀ P̂); mean = P̂ Qᵀ. The residual is M - P̂ P̂ᵀ M. Two rounds, each one
    all-reduce for all matrices of the unit. A zero matrix gives a zero mean: the basis comes from a Householder QR, which
    completes deficient columns instead of dividing by their norm.

    Args:
        rank: columns of P and Q. Higher: more bytes, smaller error.
        reuse: start from the last step's Q; without it from new random numbers, which converges more slowly.
    """

    feedback = True

    rank: int = 4
    reuse: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"powersgd: rank is {self.rank}; expected 1 or more")

    def init(self, unit: UnitSpec) -> State:
        return {"q": torch.cat([_random_q(tensor, self._columns(tensor)) for tensor in unit.tensors])}

    def layout(self) -> Mapping[str, Layout]:
        return {"q": Layout(self._q_elems, Role.REPLICATED)}

    @property
    def rounds(self) -> int:
        return 2

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        tensors = step.unit.tensors
        matrices = [part.view(t.matrix_shape) for t, part in zip(tensors, x.split(step.unit.sizes), strict=True)]
        qs = self._unflatten(state["q"], [(t.matrix_shape[1], self._columns(t)) for t in tensors])

        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        reduced = yield AllReduce(_flatten(ps))
        bases = [torch.linalg.qr(p).Q for p in self._unflatten(reduced, [tuple(p.shape) for p in ps])]

        local_qs = [m.T @ basis for m, basis in zip(matrices, bases, strict=True)]
        q = yield AllReduce(_flatten(local_qs))
        mean_qs = self._unflatten(q, [tuple(one.shape) for one in local_qs])

        mean = _flatten([basis @ mean_q.T for basis, mean_q in zip(bases, mean_qs, strict=True)])
        for matrix, basis, local_q in zip(matrices, bases, local_qs, strict=True):
            matrix.addmm_(basis, local_q.T, alpha=-1)
        return Exchanged(mean, x, {"q": self._next_q(mean_qs, step)})

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        p_bytes = 4 * sum(t.matrix_shape[0] * self._columns(t) for t in unit.tensors)
        q_bytes = 4 * sum(self._q_elems(t) for t in unit.tensors)
        return sum(2 * (world_size - 1) * nbytes // world_size for nbytes in (p_bytes, q_bytes))

    def _columns(self, tensor: TensorSpec) -> int:
        return min(self.rank, *tensor.matrix_shape)

    def _q_elems(self, tensor: TensorSpec) -> int:
        return tensor.matrix_shape[1] * self._columns(tensor)

    def _next_q(self, mean_qs: Sequence[Tensor], step: Step) -> Tensor:
        if self.reuse:
            return _flatten([_of_unit_magnitude(q) for q in mean_qs])
        drawn = torch.randn(sum(q.numel() for q in mean_qs), generator=step.generator("powersgd"))
        return drawn.to(mean_qs[0].device)

    def _unflatten(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        parts = flat.split([rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(rank=4), cls(rank=1, reuse=False)]


def _flatten(matrices: Sequence[Tensor]) -> Tensor:
    return torch.cat([matrix.reshape(-1) for matrix in matrices])


def _of_unit_magnitude(q: Tensor) -> Tensor:
    """Q is as large as the gradient and only its columns' span matters; unscaled, M Q would overflow beyond 1e19."""
    return q / q.abs().amax().clamp(min=torch.finfo(q.dtype).tiny) if q.numel() else q


def _random_q(tensor: TensorSpec, columns: int) -> Tensor:
    """The first guess: the same on all ranks, whatever else shares the unit."""
    generator = Step(0, UnitSpec((tensor,))).generator("powersgd init")
    return torch.randn(tensor.matrix_shape[1] * columns, generator=generator).to(tensor.device)
