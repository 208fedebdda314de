"""QSGD: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding (NeurIPS'17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core import Codec, Compressor, ConfigError, Payload, Step, UnitSpec, register
from thinwire.core.blocks import aligned_elems, from_blocks, to_blocks

_BLOCK = 256


@register("qsgd")
@dataclass(frozen=True, kw_only=True)
class Qsgd(Codec):
    """Stochastic rounding to s = 2^(bits-1) - 1 levels of each block's largest magnitude: unbiased, no residual needed.

    E[C(x)] = x: code = floor(s·x/max|x| + u) with u uniform in [0, 1). Deviates from the paper in that the block maximum
    replaces the 2-norm (finer levels) and codes are packed at a fixed width instead of Elias coding.

    Args:
        bits: 8 or 4 bits per value, sign included. Lower: fewer bytes, more noise.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"qsgd: bits is {self.bits}; expected 4 or 8")

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def encode(self, x: Tensor, step: Step) -> Payload:
        aligned = to_blocks(x, step.unit, _BLOCK)
        blocks = pad(aligned, (0, -aligned.numel() % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(dim=1) / self._levels
        noise = torch.rand(blocks.shape, generator=step.generator("qsgd", per_rank=True)).to(x.device)
        usable = (scales >= torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.where(usable, blocks / scales[:, None], 0).add_(noise).floor_()
        codes = torch.where(usable, codes.clamp_(-self._levels, self._levels), 0).to(torch.int8).view(-1)
        return Payload(scales=torch.where(usable[:, 0], scales, 0), codes=self._pack(codes))

    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor:
        codes = self._unpack(payload["codes"]).to(torch.float32).view(-1, _BLOCK)
        return from_blocks((codes * payload["scales"][:, None]).view(-1), unit, _BLOCK)

    def payload_bytes(self, unit: UnitSpec) -> int:
        blocks = aligned_elems(unit, _BLOCK) // _BLOCK
        codes = (torch.uint8 if self.bits == 4 else torch.int8, blocks * _BLOCK * self.bits // 8)
        return Payload.size({"scales": (torch.float32, blocks), "codes": codes})

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes
        nibbles = (codes + 8).to(torch.uint8)
        return nibbles[0::2] | (nibbles[1::2] << 4)

    def _unpack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes
        return torch.stack([codes & 15, codes >> 4], dim=1).view(-1).to(torch.int8) - 8

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(bits=8), cls(bits=4)]
