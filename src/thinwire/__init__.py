"""thinwire: train PyTorch models over slow networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import optim
    from thinwire.api import (
        Attached,
        CheckpointError,
        Compressor,
        ConfigError,
        DesyncError,
        PayloadError,
        ThinwireError,
        TransportError,
        WireStats,
        attach,
        available,
        make,
        register,
    )

__version__ = "0.2.0"
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
    "optim",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("thinwire.optim")
    if name in __all__:
        return getattr(import_module("thinwire.api"), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
