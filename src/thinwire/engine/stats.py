"""What an attached wire has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WireStats:
    """Totals since ``attach``.

    Args:
        steps: synchronised backward passes, skipped ones included.
        skipped_steps: those in which some rank had a NaN or Inf gradient.
        wire_bytes: sent by this rank, headers included.
        dense_bytes: what a ring all-reduce of fp32 gradients would have sent.
        wait_s: the training thread stood still for communication.
        encode_s, wire_s, decode_s: the communication threads encoded, waited for the network, decoded; on gloo side by side.
    """

    steps: int = 0
    skipped_steps: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    @property
    def reduction_factor(self) -> float:
        """Dense wire bytes per byte really sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0
