"""The mean of sparse payloads, added in payload order so that every rank gets the same bits."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import SCATTER_ERROR
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import TILE_ELEMS, kernel, tile_index


def scatter_mean(payloads: Sequence[tuple[Tensor, Tensor]], world_size: int, out: Tensor) -> None:
    """See `reference.scatter_mean`.

    One launch per payload looks at its indices, one adds it; between them is the one wait, since an index out of range
    has to be refused before it is written to. Payloads whose indices do not ascend (those of banks) are sorted first.
    No atomics: on a GPU they flush subnormal numbers, and repeated indices would be added in any order.
    """
    out.zero_()
    findings = torch.zeros(len(payloads), 2, dtype=torch.int32, device=out.device)
    for (_, indices), found in zip(payloads, findings, strict=True):
        count = len(indices)
        launch.run(_look_at_indices, launch.tiles(count), out, indices, found, count, out.numel(), TILE=TILE_ELEMS)
    for rank, ((values, indices), found) in enumerate(zip(payloads, findings.tolist(), strict=True)):
        outside, descending = found
        if outside:
            raise ValueError(SCATTER_ERROR.format(rank=rank, last=out.numel() - 1))
        if descending:
            indices, order = indices.sort(stable=True)
            values = values[order]
        arguments = values, indices, out, 1.0 / world_size, len(indices)
        launch.run(_add_payload, launch.tiles(len(indices)), out, *arguments, TILE=TILE_ELEMS)


@kernel
def _look_at_indices(
    indices: tl.tensor, found: tl.tensor, count: tl.tensor, numel: tl.tensor, TILE: tl.constexpr
) -> None:
    """Sets `found[0]` if an index is out of range, `found[1]` if one is below the one before it."""
    entry = tile_index(TILE)
    inside = entry < count
    index = tl.load(indices + entry, mask=inside, other=0)
    before = tl.load(indices + entry - 1, mask=inside & (entry > 0), other=-2147483648)
    outside = inside & ((index < 0) | (index >= numel))
    tl.store(found, 1, mask=tl.max(outside.to(tl.int32), axis=0) > 0)
    tl.store(found + 1, 1, mask=tl.max((inside & (index < before)).to(tl.int32), axis=0) > 0)


@kernel
def _add_payload(
    values: tl.tensor, indices: tl.tensor, out: tl.tensor, weight: tl.tensor, count: tl.tensor, TILE: tl.constexpr
) -> None:
    """The first entry of every run of equal indices adds the whole run, one by one; a run is nearly always one entry."""
    entry = tile_index(TILE)
    inside = entry < count
    index = tl.load(indices + entry, mask=inside, other=-1)
    before = tl.load(indices + entry - 1, mask=inside & (entry > 0), other=-1)
    leads = inside & (index != before)
    total = tl.load(out + index, mask=leads, other=0.0)
    adding, step = leads, 0
    while tl.max(adding.to(tl.int32), axis=0) > 0:
        value = tl.load(values + entry + step, mask=adding, other=0.0)
        total = tl.where(adding, total + value * weight, total)
        step += 1
        adding = adding & (entry + step < count)
        adding = adding & (tl.load(indices + entry + step, mask=adding, other=-1) == index)
    tl.store(out + index, total, mask=leads)
