"""The gradients of one optimizer step as bytes, bit for bit, and back. Mostly zeros are written as positions and values.

Zeros are found by their bits, so a negative zero is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.sealed import Damaged

_SAMPLE = 4096  # elements looked at before all of them are: dense gradients are not searched for zeros
_WORTH_IT = 0.4  # of the elements; above it positions and values are no smaller


def encode(gradients: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """By name; dense ones are the tensors themselves and no copies."""
    return {name: _encode(gradient.detach()) for name, gradient in gradients}


def decode(encoded: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradients by name.

    Raises:
        Damaged: positions or shapes do not fit.
    """
    return {name: _decode(name, one) for name, one in encoded.items()}


def _encode(gradient: Tensor) -> Any:
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        return {"kind": "coo", "at": gradient.indices(), "values": gradient.values(), "shape": list(gradient.shape)}
    if gradient.device.type != "cpu":
        gradient = gradient.cpu()
    if gradient.dtype is torch.float32 and gradient.is_contiguous() and gradient.numel() > _SAMPLE:
        found = _nonzero(gradient.view(-1).view(torch.int32).numpy())
        if found is not None:
            at, values = found
            return {"kind": "sparse", "shape": list(gradient.shape),
                    "at": torch.from_numpy(at), "values": torch.from_numpy(values)}  # fmt: skip
    return {"kind": "dense", "values": gradient}


def _nonzero(bits: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[Any, Any] | None:
    """Positions (int32) and values of what is not zero; None where that is too much."""
    stride = max(len(bits) // _SAMPLE, 1)
    if np.count_nonzero(bits[::stride]) > _WORTH_IT * len(bits[::stride]) or len(bits) >= 1 << 31:
        return None
    even = len(bits) & ~1
    # Two elements at a time: three times as fast as one by one, for most pairs are zero.
    pairs = np.flatnonzero(bits[:even].view(np.int64) != 0)
    places = np.empty((len(pairs), 2), np.int32)
    places[:, 0] = pairs * 2
    places[:, 1] = places[:, 0] + 1
    flat = places.reshape(-1)
    if even < len(bits):
        flat = np.append(flat, np.int32(even))
    kept = bits[flat] != 0
    at = flat[kept]
    if len(at) > _WORTH_IT * len(bits):
        return None
    return at, bits[at].view(np.float32)


def _decode(name: str, encoded: Mapping[str, Any]) -> Tensor:
    kind, values = encoded.get("kind"), encoded.get("values")
    if not isinstance(values, Tensor):
        raise Damaged(f"the gradient of {name} has no values")
    if kind == "dense":
        return values
    at, shape = encoded.get("at"), encoded.get("shape")
    if not isinstance(at, Tensor) or not isinstance(shape, list):
        raise Damaged(f"the gradient of {name} has no positions")
    if kind == "coo":
        return torch.sparse_coo_tensor(at, values, shape, check_invariants=True).coalesce()
    dense = torch.zeros(shape)
    if len(at) != len(values) or (len(at) and (int(at.min()) < 0 or int(at.max()) >= dense.numel())):
        raise Damaged(f"the gradient of {name} has positions outside of {shape}")
    dense.view(-1)[at.long()] = values
    return dense
