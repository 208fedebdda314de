"""Adapters between models and the exchange of their gradients."""

from thinwire.engine.attach import attach
from thinwire.engine.attached import Attached
from thinwire.engine.stats import WireStats

__all__ = ["Attached", "WireStats", "attach"]
