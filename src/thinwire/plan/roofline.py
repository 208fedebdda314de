"""The roofline with a third ceiling: compute, memory and the network.

attainable FLOP/s = min(compute roof, I_mem · memory roof, I_net · network rate(n)); I_mem is FLOPs per byte moved, I_net
FLOPs per byte on the wire and the rate that of messages of the size in use (Zhang et al., FPGA'15; a bandwidth that grows
with the size of a burst: Caffeine, ICCAD'16). A larger local batch raises I_net (the same gradient for more FLOPs) and leaves
I_mem about as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from thinwire.fusion import ModelProfile
from thinwire.plan.roofs import Roofs

Ceiling = Literal["compute", "memory", "network"]


@dataclass(frozen=True)
class Roofline:
    """FLOP/s under each ceiling, for one compressor.

    Args:
        achieved: FLOP/s that the model reached while it was profiled, below the first two ceilings.
        wire_bytes: of one rank and step.
        network_bytes_per_s: what one rank sends per second in messages of the size in use.
    """

    flops: float
    achieved: float
    compute: float
    memory: float
    network: float
    wire_bytes: float
    network_bytes_per_s: float
    batch: int

    @property
    def binding(self) -> Ceiling:
        """The lowest ceiling: what a faster one would not help."""
        ceilings: dict[Ceiling, float] = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return min(ceilings, key=lambda name: ceilings[name])

    @property
    def attainable(self) -> float:
        """FLOP/s under the lowest ceiling."""
        return min(self.compute, self.memory, self.network)

    @property
    def turning_batch(self) -> float:
        """The local batch from which on the network can keep up with what the model really computes."""
        return self.batch * self.achieved / self.network

    @property
    def turning_bytes_per_s(self) -> float:
        """The network rate from which on it can, at this batch."""
        return self.network_bytes_per_s * self.achieved / self.network

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        derived = {name: getattr(self, name) for name in ("binding", "attainable", "turning_batch")}
        return {**asdict(self), **derived, "turning_bytes_per_s": self.turning_bytes_per_s}


def roofline(profile: ModelProfile, roofs: Roofs, wire_bytes: float, network_bytes_per_s: float) -> Roofline:
    """The ceilings over a model that sends ``wire_bytes`` per step."""
    busy_s = max(profile.forward_s + profile.backward_s, 1e-12)
    flops = max(profile.flops, 1.0)
    return Roofline(
        flops=flops,
        achieved=flops / busy_s,
        compute=roofs.flops_per_s,
        memory=flops / max(profile.memory_bytes, 1.0) * roofs.memory_bytes_per_s,
        network=flops / max(wire_bytes, 1.0) * network_bytes_per_s,
        wire_bytes=wire_bytes,
        network_bytes_per_s=network_bytes_per_s,
        batch=profile.batch,
    )
