"""A model cut into fragments that are averaged at different steps. Pure functions.

A piece is a range of elements of one tensor, counted in the order in which they lie in memory: a view of the weights
themselves, whatever their layout. A checkpoint keeps no pieces: what belongs to a tensor is joined under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.core import Compressor, ConfigError, State, TensorSpec
from thinwire.engine.views import as_real
from thinwire.exchange.states import check_tensor

_BLOCK = 64  # few-bit formats have one scale for so many values: cuts inside a block would cost another


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a tensor.

    Args:
        owner: the tensor's name.
        spec: the piece as a channel knows it. Anchors and deltas are fp32, whatever the weights are.
    """

    owner: str
    start: int
    end: int
    spec: TensorSpec

    @property
    def name(self) -> str:
        return self.spec.fqn

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of its owner, flat; a view."""
        return flat(tensor)[self.start : self.end]


def flat(tensor: Tensor) -> Tensor:
    """A view of all elements in memory order; complex ones as pairs of reals.

    Raises:
        ConfigError: the tensor has gaps or elements that share memory.
    """
    try:
        return _in_memory_order(tensor).view(-1)
    except RuntimeError:
        raise ConfigError(
            f"a parameter of shape {tuple(tensor.shape)} has strides {tensor.stride()}; local steps need tensors without "
            "gaps, so call .contiguous() on it before attach"
        ) from None


def _in_memory_order(tensor: Tensor) -> Tensor:
    real = as_real(tensor.detach())
    strides = real.stride()
    return real.permute(sorted(range(real.dim()), key=strides.__getitem__, reverse=True))


def cut(tensors: Mapping[str, Tensor], count: int, *, whole: bool = False) -> list[list[Piece]]:
    """Fragment f of ``count`` holds elements [N f/count, N (f+1)/count) of all tensors one behind the other.

    Args:
        whole: tensors are not cut; each goes where its middle lies. Fragments of small models may be empty.
    """
    total = sum(flat(tensor).numel() for tensor in tensors.values())
    edges = [] if whole else [total * f // count for f in range(1, count)]
    fragments: list[list[Piece]] = [[] for _ in range(count)]
    position = 0
    for name, tensor in tensors.items():
        numel = flat(tensor).numel()
        inside = {(edge - position) // _BLOCK * _BLOCK for edge in edges if _BLOCK <= edge - position < numel}
        for start, end in pairwise((0, *sorted(inside), numel)):
            if end > start:
                fragment = (2 * position + start + end) * count // (2 * total)
                fragments[fragment].append(_piece(name, tensor, start, end))
        position += numel
    return fragments


def _piece(name: str, tensor: Tensor, start: int, end: int) -> Piece:
    ordered = _in_memory_order(tensor)
    is_whole = end - start == ordered.numel()
    # Routing leaves vectors dense. A part of a matrix is still a matrix to it, if only of one row.
    shape = tuple(ordered.shape) if is_whole else (end - start,) if ordered.dim() < 2 else (1, end - start)
    dtype = torch.float64 if ordered.dtype is torch.float64 else torch.float32
    label = name if is_whole else f"{name}@{start}:{end}"
    return Piece(name, start, end, TensorSpec(label, shape, dtype, ordered.device))


def join(pieces: Iterable[Piece], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies by owner, of values by piece."""
    return {owner: torch.cat([values[piece.name] for piece in of]) for owner, of in _by_owner(pieces).items()}


def split(pieces: Iterable[Piece], joined: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What ``join`` has joined, on the devices of the pieces; copies."""
    values: dict[str, Tensor] = {}
    for owner, of in _by_owner(pieces).items():
        parts = joined[owner].split([piece.end - piece.start for piece in of])
        values |= {p.name: part.to(p.spec.device, copy=True) for p, part in zip(of, parts, strict=True)}
    return values


def join_states(pieces: Iterable[Piece], states: Mapping[str, State]) -> dict[str, State]:
    """Compressor states by owner. A short piece may go dense and have no state: then the others' follow one another."""
    joined: dict[str, State] = {}
    for owner, of in _by_owner(pieces).items():
        keys = dict.fromkeys(key for piece in of for key in states[piece.name])
        joined[owner] = {k: torch.cat([states[p.name][k] for p in of if k in states[p.name]]) for k in keys}
    return joined


def split_states(
    pieces: Iterable[Piece], joined: Mapping[str, State], compressor: Compressor
) -> dict[str, dict[str, Tensor]]:
    """What ``join_states`` has joined; raises CheckpointError where lengths do not fit."""
    states: dict[str, State] = {piece.name: {} for piece in pieces}
    for owner, of in _by_owner(pieces).items():
        layouts = {piece.name: compressor.route(piece.spec).layout() for piece in of}
        for key, value in joined[owner].items():
            lengths = {p.name: layouts[p.name][key].numel(p.spec) for p in of if key in layouts[p.name]}
            check_tensor(f"{key} of {owner}", value, sum(lengths.values()), value.dtype)
            for name, part in zip(lengths, value.split(list(lengths.values())), strict=True):
                states[name][key] = part.clone()
    return states


def _by_owner(pieces: Iterable[Piece]) -> dict[str, Sequence[Piece]]:
    """In the order of their elements."""
    owners: dict[str, list[Piece]] = {}
    for piece in pieces:
        owners.setdefault(piece.owner, []).append(piece)
    return {owner: sorted(of, key=lambda piece: piece.start) for owner, of in owners.items()}
