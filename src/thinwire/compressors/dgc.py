"""DGC: Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training (ICLR'18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.topk import TopK
from thinwire.core import (
    ELEMENTWISE,
    RESIDUAL,
    AllGather,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Payload,
    State,
    Step,
    UnitSpec,
    register,
)


@register("dgc")
@dataclass(frozen=True, kw_only=True)
class DGC(TopK):
    """Top-k of an accumulated velocity: u = momentum·u + g; v = v + u; send top-k of v; zero u and v where sent.

    Use it with an optimizer *without* momentum: the momentum is in what arrives, and conservation holds for u, not for g.
    Zeroing u where it was sent (momentum factor masking, section 3.3) keeps stale entries from pushing on. It keeps its
    own residual v, so no error feedback is put around it. The paper's warm-up over the first epochs is written
    ``dgc(density=warmup(0.25, 0.001, steps=...))``.

    Deviates: the paper clips by the norm of the whole gradient, this by that of each tensor (an exchange sees no more), and
    rounding errors of ``values`` stay in v.

    Args:
        density: fraction of the entries to send. Lower: fewer bytes, older updates.
        momentum: the coefficient of u, as in SGD.
        clip: the largest norm of a tensor's *mean* gradient; each rank scales its own to at most clip / sqrt(world size)
            before it is accumulated. 0: no clipping.
    """

    feedback = False

    momentum: float = 0.9
    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc: momentum is {self.momentum}; expected 0 or more and below 1, for example 0.9")
        if not self.clip >= 0:
            raise ConfigError(
                f"dgc: clip is {self.clip}; expected the largest norm of a tensor's gradient, or 0 for none"
            )

    def init(self, unit: UnitSpec) -> State:
        zeros = torch.zeros(unit.numel, device=unit.device)
        return {"velocity": zeros, "residual": zeros.clone(), "sent": torch.zeros_like(zeros, dtype=torch.bool)}

    def layout(self) -> Mapping[str, Layout]:
        # The velocity is masked by `sent` when it is next used: at rest it is what this step has accumulated.
        return {"velocity": ELEMENTWISE, "residual": RESIDUAL, "sent": ELEMENTWISE}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        velocity = state["velocity"].masked_fill(state["sent"], 0.0)
        kernels.compensate(self._clipped(x, step), state["residual"], velocity=velocity, momentum=self.momentum, out=x)
        chosen = now.select(x, step)
        sent = torch.zeros_like(state["sent"])
        sent[chosen.indices.long()] = True
        payload, residual = now.pack(chosen, now.places(step.unit))
        gathered = yield AllGather(payload.to_bytes())
        mean = now.combine([Payload.from_bytes(message) for message in gathered], step)
        return Exchanged(mean, None, {"velocity": velocity, "residual": residual, "sent": sent})

    def _clipped(self, x: Tensor, step: Step) -> Tensor:
        if not self.clip:
            return x
        limit = self.clip / step.world_size**0.5
        _, squares = kernels.segment_moments(x, step.unit.offsets)
        factors = (limit / squares.sqrt()).clamp_max(1.0).tolist()  # limit / 0 is infinite, and then 1
        for part, factor in zip(x.split(step.unit.sizes), factors, strict=True):
            if factor < 1:
                part.mul_(factor)
        return x

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(density=0.05), cls(density=0.1, clip=1.0, values="int8")]
