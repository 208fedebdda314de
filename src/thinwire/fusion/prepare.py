"""A user's choice of compressor, made ready for tensors of all sizes, and what it sends of them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, TensorSpec, UnitSpec, Wrapper, make
from thinwire.wrappers import with_feedback
from thinwire.wrappers.routing import Route


def prepare(spec: str | Compressor) -> Compressor:
    """Error feedback where needed, small tensors routed to dense."""
    compressor = with_feedback(make(spec))
    return compressor if _routes(compressor) else Route(inner=compressor)


def _routes(compressor: Compressor) -> bool:
    return isinstance(compressor, Route) or (isinstance(compressor, Wrapper) and _routes(compressor.inner))


def units_of(tensors: Sequence[TensorSpec], compressor: Compressor) -> dict[Compressor, tuple[TensorSpec, ...]]:
    """Tensors by the compressor that routing gives them."""
    units: dict[Compressor, tuple[TensorSpec, ...]] = {}
    for tensor in tensors:
        chosen = compressor.route(tensor)
        units[chosen] = (*units.get(chosen, ()), tensor)
    return units


def wire_bytes(tensors: Sequence[TensorSpec], compressor: Compressor, world_size: int) -> int:
    """What one rank sends in one step."""
    units = units_of(tensors, compressor)
    return sum(chosen.wire_bytes(UnitSpec(members), world_size) for chosen, members in units.items())


def wire_share(tensors: Sequence[TensorSpec], compressor: Compressor, world_size: int) -> float:
    """What one rank sends as a fraction of what it would send dense; 1 where that is nothing."""
    dense_bytes = wire_bytes(tensors, Dense(), world_size)
    return wire_bytes(tensors, compressor, world_size) / dense_bytes if dense_bytes else 1.0
