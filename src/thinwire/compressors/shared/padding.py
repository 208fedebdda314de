"""Padding that leaves the mean magnitude of a block about as it is: the values before it, over and over.

Tensors are padded to whole blocks. Zeros would lower a scale that is a mean: of a scalar a 64th would arrive in each step.
Repeated values keep their signs, so that in a mean over the ranks they are as small as what they repeat.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import torch
from torch import Tensor


def fill_padding(blocks: Tensor, sizes: tuple[int, ...], *, first: int = 0, together: int = 1) -> None:
    """Repeat the values of a block where it is padded.

    Args:
        blocks: some blocks (a row each) of a unit with tensors of these ``sizes``, from number ``first`` on.
        together: every tensor begins at a multiple of so many blocks.
    """
    numbers, lengths = _partial_blocks(sizes, blocks.shape[1], together)
    some = slice(bisect_left(numbers, first), bisect_left(numbers, first + len(blocks)))
    if not numbers[some]:
        return
    at = torch.tensor(numbers[some], device=blocks.device) - first
    length = torch.tensor(lengths[some], device=blocks.device)[:, None]
    blocks[at] = blocks[at].gather(1, torch.arange(blocks.shape[1], device=blocks.device) % length)


@lru_cache(maxsize=256)
def _partial_blocks(sizes: tuple[int, ...], block: int, together: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks that end in padding, and how many values each has."""
    numbers, lengths, start = [], [], 0
    for size in sizes:
        if size % block:
            numbers.append(start + size // block)
            lengths.append(size % block)
        start += -(-size // (block * together)) * together
    return tuple(numbers), tuple(lengths)
