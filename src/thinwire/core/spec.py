"""What is sent: single tensors, and the units in which they travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorSpec:
    """One parameter, known by its fully qualified name."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The tensor seen as (first axis, everything else); convolutions become (out, in·kh·kw)."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.numel // max(rows, 1)


@dataclass(frozen=True)
class UnitSpec:
    """Tensors that share a compressor and travel as one flat fp32 buffer, each keeping its own semantics.

    ``offsets`` are the bounds of the tensors in that buffer: a compressor that works per tensor (a top-k, a scale)
    works per segment, at the cost of one call for all of them.
    """

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def flat(cls, numel: int, name: str = "flat") -> UnitSpec:
        """A unit of one nameless vector, for pieces of a larger one."""
        return cls((TensorSpec(name, (numel,)),))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate((tensor.numel for tensor in self.tensors), initial=0))

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(tensor.numel for tensor in self.tensors)

    @cached_property
    def name(self) -> str:
        """Stable for the same tensors, whatever the order of creation: part of the seed of random choices."""
        return "+".join(tensor.fqn for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        """Where the unit lives; all its tensors are on one device."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def dense_bytes(self) -> int:
        """Bytes of the unit as fp32."""
        return 4 * self.numel
