"""A user's choice of compressor, made ready for tensors of all sizes, and what it sends of them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, TensorSpec, UnitSpec, Wrapper, make
from thinwire.wrappers import ErrorFeedback, with_feedback
from thinwire.wrappers.host import OnHost
from thinwire.wrappers.routing import Route


def prepare(spec: str | Compressor) -> Compressor:
    """Error feedback where needed, small tensors routed to dense."""
    compressor = with_feedback(make(spec))
    return compressor if _routes(compressor) else Route(inner=compressor)


def _routes(compressor: Compressor) -> bool:
    return isinstance(compressor, Route) or (isinstance(compressor, Wrapper) and _routes(compressor.inner))


def units_of(
    tensors: Sequence[TensorSpec], compressor: Compressor, *, dense: Sequence[str] = (), hosted: Sequence[str] = ()
) -> dict[Compressor, tuple[TensorSpec, ...]]:
    """Tensors by the compressor that routing gives them, in order of first use.

    Args:
        dense: names of tensors that are sent dense although the compressor would do otherwise.
        hosted: names of tensors whose compressor runs on the host.
    """
    units: dict[Compressor, tuple[TensorSpec, ...]] = {}
    for tensor in tensors:
        chosen = compressor.route(tensor)
        if tensor.fqn in dense and isinstance(chosen, ErrorFeedback):
            chosen = ErrorFeedback(inner=Dense())  # still with feedback: it sends what waits in the tensor's residual
        elif tensor.fqn in hosted:
            chosen = OnHost(inner=chosen)
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
