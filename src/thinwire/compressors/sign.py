"""Sign: Karimireddy et al., Error Feedback Fixes SignSGD (ICML'19)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import Codec, Payload, Step, UnitSpec, register


@register("sign")
@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Send one bit per entry and, per tensor, the mean magnitude: C(c) = ‖c‖₁/n · sign(c), sign(0) = +1."""

    feedback = True

    def encode(self, x: Tensor, step: Step) -> Payload:
        scales = [part.abs().mean() if part.numel() else x.new_zeros(()) for part in x.split(step.unit.sizes)]
        return Payload(scales=torch.stack(scales), bits=kernels.pack_bits(x >= 0))

    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor:
        signs = kernels.unpack_bits(payload["bits"], unit.numel).to(torch.float32).mul_(2).sub_(1)
        sizes = torch.tensor(unit.sizes, device=signs.device)
        return signs * payload["scales"].repeat_interleave(sizes)

    def payload_bytes(self, unit: UnitSpec) -> int:
        return Payload.size({"scales": (torch.float32, len(unit.sizes)), "bits": (torch.uint8, -(-unit.numel // 8))})
