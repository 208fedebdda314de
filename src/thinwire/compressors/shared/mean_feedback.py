"""A mean with a residual of its own, for encodings whose error is not small.

In the other block formats (``blockwise``) what the owner of a shard loses when it encodes the mean goes, times the world size
W, into its own residual, and from there through the first round again. Here it is added to the next *mean* of the same shard:
q_i being what rank i sent,

    w = 1/W · sum_i q_i + m/W;   d = C(w), which all apply;   m = W·(w - d)

m is kept instead of m/W because it is then like any residual: gradient of this rank that waits, whose mean over the ranks is
what is missing. So where fusion groups, layer selection or the world change who owns an element, its former owner adds m to
what it sends itself, and nothing is lost. A rank keeps m for the whole unit, zero where it owns nothing. The idea is that of
DoubleSqueeze (Tang et al., ICML'19), whose server keeps it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.blockwise import average_shard, share_shards
from thinwire.compressors.shared.coders import Coder
from thinwire.core import RESIDUAL, AllToAll, Layout, Request, State, Step, UnitSpec, memory

MEAN_RESIDUAL = "mean_residual"


def initial_state(unit: UnitSpec) -> State:
    """Nothing waits."""
    return {MEAN_RESIDUAL: torch.zeros(unit.numel, device=unit.device)}


def state_layout() -> Mapping[str, Layout]:
    """One element for each of the gradient; its mean over the ranks is what the mean lacks."""
    return {MEAN_RESIDUAL: RESIDUAL}


class Averaged(NamedTuple):
    """All as long as what was given, padding included."""

    mean: Tensor
    residual: Tensor
    waiting: Tensor


def averaged(u: Tensor, waiting: Tensor, coder: Coder, step: Step) -> Generator[Request, Any, Averaged]:
    """Both rounds; ``u`` (which may be overwritten) and ``waiting`` are padded to equal shards for all ranks."""
    shard = u.numel() // step.world_size
    own = slice(step.rank * shard, (step.rank + 1) * shard)
    _add_unowned(u, waiting, own)
    sent = coder.write(u, 0, step.world_size, None, step.residual)
    if not sent.finite:
        step.refuse(sent.residual)
    received = yield AllToAll.of(sent.headroom)
    mean = average_shard(received, coder, step, shard, u.device).add_(waiting[own], alpha=1 / step.world_size)
    whole, lost = yield from share_shards(mean, memory.zeros(u.numel(), device=u.device), coder, step)
    return Averaged(whole, sent.residual, lost)


def _add_unowned(u: Tensor, waiting: Tensor, own: slice) -> None:
    """What this rank keeps for means that others form now becomes part of what it sends; after most steps there is none."""
    before, _, behind = kernels.segment_amax(waiting, (0, own.start, own.stop, waiting.numel())).tolist()
    if before or behind:
        u[: own.start] += waiting[: own.start]
        u[own.stop :] += waiting[own.stop :]
