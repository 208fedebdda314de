"""ACP-SGD: Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed Deep Learning (ICDCS'23)."""

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


@register("acp")
@dataclass(frozen=True, kw_only=True)
class ACP(Compressor):
    """PowerSGD in half steps: the mean gradient M (n × m) is sent as P (n × r) in even steps, as Q (m × r) in odd ones.

    Even: P = mean(M·Q̂), mean = P·Q̂ᵀ, P̂ = basis of P. Odd: Q = mean(Mᵀ·P̂), mean = P̂·Qᵀ, Q̂ = basis of Q. One all-reduce
    per step, about half the bytes of ``powersgd`` of the same rank; each half step uses the basis that the other one left.
    The residual is M minus its projection. That the factors alternate and one is sent per step is the paper's; keeping the
    basis in place of the factor, so that nothing of the gradient's magnitude is carried over, is ours.

    Args:
        rank: columns of P and Q. Higher: more bytes, smaller error.
    """

    feedback = True

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"acp: rank is {self.rank}; expected 1 or more")

    @property
    def exact_bytes(self) -> bool:
        """P and Q differ in size unless the matrices are square; ``wire_bytes`` is the mean of even and odd steps."""
        return False

    def init(self, unit: UnitSpec) -> State:
        return {key: torch.cat([self._random_basis(tensor, key) for tensor in unit.tensors]) for key in ("p", "q")}

    def layout(self) -> Mapping[str, Layout]:
        return {"p": Layout(self._p_elems, Role.REPLICATED), "q": Layout(self._q_elems, Role.REPLICATED)}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        even = step.index % 2 == 0
        tensors, known, sought = step.unit.tensors, *(("q", "p") if even else ("p", "q"))
        parts = zip(tensors, x.split(step.unit.sizes), strict=True)
        matrices = [part.view(t.matrix_shape) if even else part.view(t.matrix_shape).T for t, part in parts]
        bases = self._matrices(state[known], tensors, known)

        factors = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        reduced = yield AllReduce(_flat(factors))
        mean_factors = self._matrices(reduced, tensors, sought)

        outer = [factor @ basis.T for factor, basis in zip(mean_factors, bases, strict=True)]
        mean = _flat(outer if even else [product.T for product in outer])
        for matrix, factor, basis in zip(matrices, factors, bases, strict=True):
            matrix.sub_(factor @ basis.T)
        found = _flat([torch.linalg.qr(factor).Q for factor in mean_factors])
        return Exchanged(mean, x, {known: state[known], sought: found})

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        both = 4 * sum(self._p_elems(tensor) + self._q_elems(tensor) for tensor in unit.tensors)
        return (world_size - 1) * both // world_size

    def _columns(self, tensor: TensorSpec) -> int:
        return min(self.rank, *tensor.matrix_shape)

    def _p_elems(self, tensor: TensorSpec) -> int:
        return tensor.matrix_shape[0] * self._columns(tensor)

    def _q_elems(self, tensor: TensorSpec) -> int:
        return tensor.matrix_shape[1] * self._columns(tensor)

    def _matrices(self, flat: Tensor, tensors: Sequence[TensorSpec], key: str) -> list[Tensor]:
        """The factors P or Q of all tensors, from one buffer."""
        shapes = [(t.matrix_shape[0 if key == "p" else 1], self._columns(t)) for t in tensors]
        parts = flat.split([rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _random_basis(self, tensor: TensorSpec, key: str) -> Tensor:
        """The first guess: the same on all ranks, whatever else shares the unit."""
        generator = Step(0, UnitSpec((tensor,))).generator(f"acp {key}")
        shape = (tensor.matrix_shape[0 if key == "p" else 1], self._columns(tensor))
        basis: Tensor = torch.linalg.qr(torch.randn(shape, generator=generator)).Q
        return basis.reshape(-1).to(tensor.device)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(rank=4), cls(rank=1)]


def _flat(matrices: Sequence[Tensor]) -> Tensor:
    return torch.cat([matrix.reshape(-1) for matrix in matrices])
