"""What a wire's saved state remembers, read by roles and never by key names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.core import Role


def has_memory(state: Mapping[str, Any]) -> bool:
    """Whether it holds anything that a log of gradients cannot rebuild."""
    return bool(state.get("carried")) or bool(state.get("ages")) or any(state["tensors"].values())


def without_memory(state: Mapping[str, Any], index: int | None, *, forget: bool) -> dict[str, Any]:
    """The state some transactions later.

    Residuals begin at zero, for what they held has been applied or is not known; everything else stays as it was.

    Args:
        index: transactions begun by then.
        forget: there are residuals.
    """
    later = {**state, "step": state["step"] if index is None else index}
    if forget:
        roles = state["roles"]
        later["tensors"] = {
            name: {
                key: torch.zeros_like(value) if roles[name].get(key) == Role.RESIDUAL.value else value
                for key, value in piece.items()
            }
            for name, piece in state["tensors"].items()
        }
        later["carried"] = {}
    return later
