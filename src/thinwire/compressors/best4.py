"""The 4-bit grid that fits: after Guo et al., ANT: Exploiting Adaptive Numerical Data Type (MICRO'22)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compressors.shared.agreed import ONE_PER_TENSOR
from thinwire.compressors.shared.blockwise import FewBits, shard_elems, sharded_mean
from thinwire.compressors.shared.coders import Coder, split_message
from thinwire.core import (
    AllReduce,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    State,
    Step,
    UnitSpec,
    register,
)
from thinwire.formats import Encoded, WireFormat, choose, grids, wire_format

_NOT_CHOSEN = -1


@register("best4")
@dataclass(frozen=True, kw_only=True)
class Best4(FewBits):
    """Four bits per value on whichever grid and clip has the least error: int4, float4, pot4 or flint4, per tensor.

    Every ``refresh`` steps each rank tries all of them on a sample; the errors are averaged over the ranks and all take the
    same choice. Deviates from the paper in choosing again while training, and for gradients.

    Args:
        refresh: steps between choices. Lower: follows the data more closely, at 64 bytes more per tensor each time.
    """

    feedback = True

    refresh: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh < 1:
            raise ConfigError(f"best4: refresh is {self.refresh}; expected a number of steps, at least 1")

    @property
    def format(self) -> WireFormat:
        return wire_format("float4")  # all grids take the same bytes

    @property
    def exact_bytes(self) -> bool:
        return False

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else None
        return {"choice": torch.full((len(unit.tensors),), _NOT_CHOSEN, dtype=torch.int64, device=device)}

    def layout(self) -> Mapping[str, Layout]:
        return {"choice": ONE_PER_TENSOR}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel():
            return Exchanged(x, x.clone(), state)
        choice = state["choice"]
        if step.index % self.refresh == 0 or bool((choice == _NOT_CHOSEN).any()):
            errors = yield AllReduce(choose.measured_errors(x, step.unit))
            # What is clipped is lost to an expectation, so unbiased rounding goes without.
            choice = choose.chosen(errors, may_clip=not self.stochastic)
        blocks = shard_elems(x.numel(), step.world_size, grids.BLOCK) * step.world_size // grids.BLOCK
        coder = _MixedCoder(*choose.per_block(choice, step.unit, blocks))
        # The sample says what clipping does to gradients, not to their mean, which has been clipped already.
        owner = _MixedCoder(coder.grid, torch.ones_like(coder.clip))
        new_state = {"choice": choice}
        return (
            yield from sharded_mean(x, coder, grids.BLOCK, new_state, step, stochastic=self.stochastic, owner=owner)
        )

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(refresh=2), cls(rounding="stochastic")]


@dataclass(frozen=True)
class _MixedCoder(Coder):
    """Every block on the grid of its tensor; all ranks know which, so only codes and scales travel."""

    grid: Tensor
    clip: Tensor

    def encode(self, x: Tensor, first: int, generator: torch.Generator | None) -> Encoded:
        window = self._window(first, x.numel())
        return grids.encode_mixed(x, self.grid[window], self.clip[window], generator)

    def decode(self, message: Tensor, first: int, weight: float, out: Tensor, accumulate: bool) -> None:
        codes, scales = split_message(message, wire_format("float4"), out.numel())
        assert scales is not None
        window = self._window(first, out.numel())
        grids.decode_mixed(codes, scales, self.grid[window], weight, out, accumulate)

    def _window(self, first: int, numel: int) -> slice:
        return slice(first // grids.BLOCK, (first + numel) // grids.BLOCK)
