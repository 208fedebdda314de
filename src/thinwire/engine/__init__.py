"""Adapters between models and the exchange of their gradients."""

from thinwire.engine.attach import Attached, attach
from thinwire.engine.stats import WireStats

__all__ = ["Attached", "WireStats", "attach"]
