"""Nested state as JSON and named tensors, and back: what ``state_dict()`` gives, without pickle.

What JSON does not have is written as an object with one key: ``{"$tensor": name}``, ``{"$tuple": [...]}``, ``{"$dict":
[[key, value], ...]}`` (keys that are no texts), ``{"$bytes": base64}``, ``{"$array": ...}`` (numpy), ``{"$float": ...}``
(NaN and infinities), ``{"$complex": name}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.sealed import Damaged
from thinwire.core import CheckpointError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_DEPTH = 50


def pack(value: Any, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """``value`` as JSON; its tensors are put into ``tensors`` under names that begin with ``name``. No copies.

    Raises:
        CheckpointError: something in it is of a type that cannot be saved; the message says where.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep; save a flatter state")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        return _pack_tensor(value, name, tensors)
    if isinstance(value, Mapping):
        return _pack_mapping(value, name, tensors, depth)
    if isinstance(value, list | tuple):
        items = [pack(one, f"{name}.{i}", tensors, depth + 1) for i, one in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": pack(torch.from_numpy(np.ascontiguousarray(value)), name, tensors, depth + 1)}
    if isinstance(value, np.generic):
        return pack(value.item(), name, tensors, depth)
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, expected tensors, numbers, texts, lists, tuples "
        "and dictionaries; give an object with state_dict() that says it in these"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``pack``; raises Damaged where it names what is not there."""
    if isinstance(value, list):
        return [unpack(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: unpack(one, tensors) for key, one in value.items()}
    ((kind, content),) = value.items()
    try:
        return _special(kind, content, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"the saved state holds {str(value)[:80]}, which cannot be read ({error})") from error


def _special(kind: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    if kind == "$tensor":
        return tensors[content]
    if kind == "$complex":
        return torch.view_as_complex(tensors[content])
    if kind == "$tuple":
        return tuple(unpack(one, tensors) for one in content)
    if kind == "$dict":
        return {unpack(key, tensors): unpack(one, tensors) for key, one in content}
    if kind == "$bytes":
        return base64.b64decode(content, validate=True)
    if kind == "$array":
        return unpack(content, tensors).numpy()
    if kind == "$float":
        return float(content)
    raise ValueError(f"no such kind as {kind}")


def _pack_tensor(value: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    if value.layout is not torch.strided or hasattr(value, "device_mesh"):
        raise CheckpointError(
            f"{name} is a {type(value).__name__} of layout {value.layout}; expected plain dense tensors (sharded models: "
            "use torch.distributed.checkpoint)"
        )
    value = value.detach()
    if value.is_complex():
        tensors[name] = torch.view_as_real(value.resolve_conj())
        return {"$complex": name}
    if value.dtype not in CODES:
        raise CheckpointError(f"{name} is {value.dtype}, expected one of {', '.join(map(str, CODES))}")
    tensors[name] = value
    return {"$tensor": name}


def _pack_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> Any:
    plain = all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
    if plain:
        return {key: pack(one, f"{name}/{key}", tensors, depth + 1) for key, one in value.items()}
    pairs = enumerate(value.items())
    return {"$dict": [[pack(key, f"{name}.k{i}", tensors, depth + 1), pack(one, f"{name}.v{i}", tensors, depth + 1)]
                      for i, (key, one) in pairs]}  # fmt: skip
