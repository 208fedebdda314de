"""The public names. ``import thinwire`` finds them here on first use, so that the command line starts without torch."""

import thinwire.compressors
import thinwire.wrappers  # noqa: F401  (these imports register what they hold)
from thinwire.core import (
    CheckpointError,
    Compressor,
    ConfigError,
    DesyncError,
    PayloadError,
    ThinwireError,
    TransportError,
    available,
    make,
    register,
)
from thinwire.observe.metrics import WireStats
from thinwire.wire import Attached, attach

__all__ = [
    "Attached",
    "CheckpointError",
    "Compressor",
    "ConfigError",
    "DesyncError",
    "PayloadError",
    "ThinwireError",
    "TransportError",
    "WireStats",
    "attach",
    "available",
    "make",
    "register",
]
