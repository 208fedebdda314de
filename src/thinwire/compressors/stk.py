"""Chunked top-k in signs: one magnitude per chunk, positions in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared import mean_feedback
from thinwire.compressors.shared.coders import Coder
from thinwire.compressors.shared.mean_feedback import MEAN_RESIDUAL
from thinwire.compressors.shared.sparse import check_density, kept
from thinwire.core import Compressor, Exchange, Exchanged, Layout, State, Step, UnitSpec, memory, register
from thinwire.formats import Encoded, elias_fano

CHUNK_ELEMS = 4096
_LARGEST = 2.0**127  # rounding a magnitude near the end of fp32 up to bf16 would give infinity
_MAGNITUDE_BYTES = 2


@register("stk")
@dataclass(frozen=True, kw_only=True)
class SignTopK(Compressor):
    """Per chunk of up to 4096 values the largest magnitudes, as positions, signs and one bf16 magnitude: their mean.

    C(u)_j = sign(u_j)·s for the k = density·n largest of a chunk's n values, s being the mean of their magnitudes, else 0.
    Positions are written in the fixed number of bits of ``formats.elias_fano`` (6.25 each at density 0.05, where the entropy
    is 5.7). As in ``int1``, each rank owns a shard, averages what the others send of it and sends the mean in the same way,
    with a residual of its own (``shared.mean_feedback``): bytes do not grow with the world, and at density 0.05 are 1/87 of
    dense. The values of SparseLoCo (Sarfi et al., 2025) have two bits; one magnitude per chunk is this project's choice.

    Chunks are of equal length and run through all tensors that travel together, which compete for places: *the result
    depends on the grouping*.

    Args:
        density: fraction of the values to send. Lower: fewer bytes, older updates.
    """

    feedback = True
    scheduled = ("density",)

    density: float = 0.05

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def sparse(self) -> bool:
        return True

    @property
    def rounds(self) -> int | None:
        return 2

    def init(self, unit: UnitSpec) -> State:
        return mean_feedback.initial_state(unit)

    def layout(self) -> Mapping[str, Layout]:
        return mean_feedback.state_layout()

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if not x.numel():
            return Exchanged(x, x.clone(), state)
        chunks = self.at(step.index).chunks(x.numel(), step.world_size)
        padded = step.world_size * chunks.per_shard * chunks.elems
        u, waiting = (memory.padded(one, padded) for one in (x, state[MEAN_RESIDUAL]))
        done = yield from mean_feedback.averaged(u, waiting, chunks, step)
        mean, residual, waiting = (one[: x.numel()] for one in done)
        return Exchanged(mean, residual, {MEAN_RESIDUAL: waiting})

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        chunks = self.chunks(unit.numel, world_size)
        return 2 * (world_size - 1) * chunks.per_shard * (chunks.code_bytes + _MAGNITUDE_BYTES)

    def chunks(self, numel: int, world_size: int) -> Chunks:
        """Equally many chunks for each shard, no longer than they must be."""
        per_shard = -(-numel // (world_size * CHUNK_ELEMS))
        elems = -(-numel // (world_size * max(1, per_shard)))
        return Chunks(per_shard, elems, kept(self.density, elems))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(), cls(density=0.3)]


@dataclass(frozen=True)
class Chunks(Coder):
    """How shards are written: ``per_shard`` chunks of ``elems`` values, ``k`` of which are sent."""

    per_shard: int
    elems: int
    k: int

    @property
    def code_bytes(self) -> int:
        """Signs and positions of a chunk, in whole words so that the magnitudes behind them are aligned."""
        return -(-(self.k + elias_fano.row_bits(self.k, self.elems)) // 16) * 2

    def encode(self, x: Tensor, first: int, generator: torch.Generator | None) -> Encoded:
        chosen = kernels.row_topk(x, None, (0, x.numel()), (self.elems,), (self.k,), out=x)
        values, places = (one.view(-1, self.k) for one in (chosen.values, chosen.indices))
        local = places - torch.arange(len(places), dtype=torch.int32, device=x.device)[:, None] * self.elems
        bits = torch.cat([values < 0, elias_fano.mask_rows(local, self.elems)], dim=1)
        bits = torch.nn.functional.pad(bits, (0, 8 * self.code_bytes - bits.shape[1]))
        # Divided before they are added: the sum of finite values then stays finite.
        magnitudes = (values.abs() / self.k).sum(dim=1).clamp(max=_LARGEST).to(torch.bfloat16)
        x[chosen.indices] = _rest(values, magnitudes.float()[:, None]).view(-1)
        return Encoded(elias_fano.pack_rows(bits).view(-1), magnitudes, x)

    def decode(self, message: Tensor, first: int, weight: float, out: Tensor, accumulate: bool) -> None:
        codes, magnitudes = message.split([self.per_shard * self.code_bytes, self.per_shard * _MAGNITUDE_BYTES])
        rows = codes.view(self.per_shard, -1)
        bits = elias_fano.unpack_rows(rows, self.k + elias_fano.row_bits(self.k, self.elems))
        local = elias_fano.positions_in(bits[:, self.k :], self.k, self.elems)
        places = local + torch.arange(self.per_shard, device=out.device)[:, None] * self.elems
        sizes = magnitudes.view(torch.bfloat16).float()[:, None] * weight
        if not accumulate:
            out.zero_()
        # No position comes twice, so the order of the additions does not matter.
        out.index_add_(0, places.view(-1), torch.where(bits[:, : self.k], -sizes, sizes).view(-1))


def _rest(values: Tensor, magnitudes: Tensor) -> Tensor:
    """What is left of the values; nothing where they are not finite, so that the residual stays clean."""
    rest = values - torch.where(values < 0, -magnitudes, magnitudes)
    return torch.where(torch.isfinite(rest), rest, 0.0)
