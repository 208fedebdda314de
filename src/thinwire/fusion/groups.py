"""Fusion groups, and their description by tensor counts: what ranks agree on and checkpoints keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from thinwire.core import ConfigError, TensorSpec

Groups = list[tuple[TensorSpec, ...]]


def tensor_counts(groups: Groups) -> list[int]:
    """How many tensors each group takes from the ready order."""
    return [len(group) for group in groups]


def groups_of_counts(tensors: Sequence[TensorSpec], counts: Sequence[int]) -> Groups:
    """Consecutive tensors in groups of the given sizes: the same tensors on every rank, whatever their bytes.

    Raises:
        ConfigError: the counts do not add up to the tensors, or a group is empty.
    """
    if sum(counts) != len(tensors) or any(count < 1 for count in counts):
        raise ConfigError(
            f"the fusion plan has groups of {list(counts)} tensors, {sum(counts)} in total; expected groups of at least "
            f"one and {len(tensors)} in total. The plan belongs to another model: make a new one"
        )
    ends = accumulate(counts, initial=0)
    return [tuple(tensors[start:end]) for start, end in pairwise(ends)]
