"""Recoverable points: checkpoints that are either whole or known to be broken, and a log of gradients between them.

Names are found on first use: the process that writes files, and ``thinwire checkpoint``, start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.checkpoint.checkpointer import Checkpointer, Restored
    from thinwire.checkpoint.interop import export_dcp, export_safetensors, import_dcp, import_safetensors

_HOMES = {
    "Checkpointer": "checkpointer",
    "Restored": "checkpointer",
    "export_dcp": "interop",
    "export_safetensors": "interop",
    "import_dcp": "interop",
    "import_safetensors": "interop",
}
__all__ = ["Checkpointer", "Restored", "export_dcp", "export_safetensors", "import_dcp", "import_safetensors"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"thinwire.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'thinwire.checkpoint' has no attribute {name!r}")
