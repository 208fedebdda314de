"""SparseLoCo: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo (2025), section 3."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.sync.local import Local
from thinwire.sync.local_steps import Numbers


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Local):
    """Local steps, then the largest few per cent of the delta; the rest waits in an error memory that fades.

    No outer momentum: A' = A + outer_lr · mean of top-k(Δ_i + decay·e_i). The memory is the compressor's, so it decays once
    per average, and with it conservation ends: what fades is never sent.

    Args:
        h: local steps, as run for a model of 72 B parameters.
        outer_lr: of the outer step.
        compress: 64 of each 4096 values are 1.56 %; ``stk`` writes their signs and one magnitude, the paper 2 bits each.
    """

    h: int = 30
    outer_lr: float = 0.4
    compress: str = "ef(decay=0.95) | stk(density=0.015625)"

    def outer(self, anchor: Tensor, mean: Tensor, memory: dict[str, Tensor], numbers: Numbers) -> Tensor:
        return anchor + self.outer_lr * mean
