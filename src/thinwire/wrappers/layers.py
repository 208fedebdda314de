"""What is chosen or left out as a whole, and how a byte budget is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from thinwire.core import UnitSpec

_NOTHING = 1e-9  # sums of shares are not exact


@dataclass(frozen=True)
class Layers:
    """The layers of a unit.

    Args:
        members: for each layer, the numbers of its tensors in the unit.
        elems: for each layer, how many elements it has.
    """

    members: tuple[tuple[int, ...], ...]
    elems: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def shares(self) -> list[float]:
        """Each layer's part of all elements, which stands for its part of the bytes. None is zero: roots divide by it."""
        total = max(1, sum(self.elems))
        return [max(elems, 1) / total for elems in self.elems]

    def spread(self, values: Sequence[float]) -> list[float]:
        """One value per layer as one per tensor."""
        by_tensor = {tensor: value for value, tensors in zip(values, self.members, strict=True) for tensor in tensors}
        return [by_tensor[tensor] for tensor in range(len(by_tensor))]


@lru_cache(maxsize=256)
def layers_of(unit: UnitSpec, merge_bytes: int) -> Layers:
    """One layer per module; neighbours are merged while both are smaller than ``merge_bytes``.

    Parameters of one module are those whose names differ in the last part only, as far as they are neighbours in the unit.
    """
    modules: list[list[int]] = []
    names: list[str] = []
    for index, tensor in enumerate(unit.tensors):
        module = tensor.fqn.rpartition(".")[0] or tensor.fqn
        if names and names[-1] == module:
            modules[-1].append(index)
        else:
            modules.append([index])
            names.append(module)
    merged: list[list[int]] = []
    for tensors in modules:
        if merged and 4 * max(_elems(unit, merged[-1]), _elems(unit, tensors)) < merge_bytes:
            merged[-1].extend(tensors)
        else:
            merged.append(tensors)
    return Layers(tuple(map(tuple, merged)), tuple(_elems(unit, tensors) for tensors in merged))


def _elems(unit: UnitSpec, tensors: Sequence[int]) -> int:
    return sum(unit.sizes[tensor] for tensor in tensors)


def spend(
    shares: Sequence[float], forced: Sequence[bool], priorities: Sequence[float], credit: float
) -> tuple[list[bool], float]:
    """Pick layers: the forced ones, then by priority as long as there is credit. The last one may overdraw it.

    Overdrawing lets layers larger than a step's budget take part; the debt is paid before anything else is picked, so the
    bytes are right on average.

    Returns:
        Which layers are picked, and the credit that is left: a debt, or zero.
    """
    picked = list(forced)
    credit -= sum(share for share, is_forced in zip(shares, forced, strict=True) if is_forced)
    for layer in sorted(range(len(shares)), key=lambda layer: -priorities[layer]):
        if credit <= _NOTHING:
            break
        if not picked[layer]:
            picked[layer] = True
            credit -= shares[layer]
    return picked, min(credit, 0.0)
