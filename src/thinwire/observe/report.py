"""What one transaction cost: the value that observers, metrics, events and the autopilot read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.comm.trace import Trace


@dataclass(frozen=True)
class StepReport:
    """One settled transaction on one rank. Seconds are of ``time.perf_counter``.

    Args:
        index: of the transaction; for gradients the training step.
        committed: False where some rank refused it; nothing has changed then.
        ready_s: when each tensor was added, by name.
        ended_s: when the training thread went on.
        wait_s: the training thread waited for communication.
        encode_s, wire_s, decode_s: the link's threads encoded, waited for the network, decoded; on gloo side by side.
        wire_bytes: sent by this rank, headers included.
        dense_bytes: what a ring all-reduce of fp32 would have sent.
        core_share: of the time from the first tensor to the last, the part in which the training thread had a core.
        local_sq, mean_sq: squared norms by name of this rank's tensors and of the means, where they were asked for.
    """

    index: int
    committed: bool
    trace: Trace
    ready_s: Mapping[str, float]
    ended_s: float
    wait_s: float
    encode_s: float
    wire_s: float
    decode_s: float
    wire_bytes: int
    dense_bytes: int
    core_share: float = 1.0
    local_sq: Mapping[str, float] = field(default_factory=dict)
    mean_sq: Mapping[str, float] = field(default_factory=dict)
