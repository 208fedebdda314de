"""thinwire: train PyTorch models over slow networks."""

import thinwire.compressors
import thinwire.feedback  # noqa: F401  (both imports register what they hold)
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
from thinwire.engine import Attached, WireStats, attach

__version__ = "0.1.0"
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
    "__version__",
    "attach",
    "available",
    "make",
    "register",
]
