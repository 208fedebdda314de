"""What identifies a model and its settings to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from thinwire.core import TensorSpec
from thinwire.fusion.groups import Group, Unit, make_group

__all__ = ["Group", "Unit", "fingerprint", "make_group"]


def fingerprint(tensors: Sequence[TensorSpec], *settings: str) -> int:
    """64 bits that differ when model or settings differ; carried by every message."""
    model = [f"{t.fqn}{t.shape}{t.dtype}" for t in tensors]
    digest = hashlib.blake2b(repr((model, settings)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
