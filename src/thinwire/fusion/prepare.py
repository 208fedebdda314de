"""A user's choice of compressor, made ready for tensors of all sizes."""

from __future__ import annotations

from thinwire.compressors.routing import Route
from thinwire.core import Compressor, Wrapper, make
from thinwire.feedback import with_feedback


def prepare(spec: str | Compressor) -> Compressor:
    """Error feedback where needed, small tensors routed to dense."""
    compressor = with_feedback(make(spec))
    return compressor if _routes(compressor) else Route(inner=compressor)


def _routes(compressor: Compressor) -> bool:
    return isinstance(compressor, Route) or (isinstance(compressor, Wrapper) and _routes(compressor.inner))
