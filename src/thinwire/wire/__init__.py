"""The façade: ``attach`` and what it returns."""

from thinwire.wire.attach import attach
from thinwire.wire.attached import Attached

__all__ = ["Attached", "attach"]
