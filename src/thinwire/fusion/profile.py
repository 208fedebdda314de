"""What a planner knows about a training step: when gradients are ready, what encoding and messages cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion.curve import Curve
from thinwire.fusion.groups import Groups

__all__ = ["Curve", "Profile", "TensorProfile"]


@dataclass(frozen=True)
class TensorProfile:
    """A gradient, and when it is there."""

    tensor: TensorSpec
    ready_s: float  # after the start of backward


@dataclass(frozen=True)
class Profile:
    """One training step as measured.

    Args:
        tensors: in the order in which their gradients are ready.
        encode: compression time (encode and decode) of a group by its number of elements.
        message: time of one message by the payload bytes of its group.
        density: payload elements per element.
        bytes_per_elem: payload bytes per payload element (value and index).
        message_cost_s: by how much a message delays backward itself, where the two share a core; otherwise 0.

    Raises:
        ConfigError: ready times that go back, or a density or element size that makes no sense.
    """

    tensors: tuple[TensorProfile, ...]
    encode: Curve
    message: Curve
    density: float = 1.0
    bytes_per_elem: float = 4.0
    message_cost_s: float = 0.0

    def __post_init__(self) -> None:
        ready = [0.0, *(one.ready_s for one in self.tensors)]
        if any(not left <= right for left, right in pairwise(ready)):
            raise ConfigError("ready times must not be negative and must not go back; sort the tensors by ready_s")
        if not (0 < self.density <= 1 and 0 < self.bytes_per_elem < math.inf):
            raise ConfigError(
                f"density is {self.density} and bytes_per_elem {self.bytes_per_elem}; "
                "expected 0 < density <= 1 and bytes_per_elem > 0"
            )

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors alone, in ready order."""
        return tuple(one.tensor for one in self.tensors)

    @cached_property
    def ready_s(self) -> tuple[float, ...]:
        """The ready times alone."""
        return tuple(one.ready_s for one in self.tensors)

    @property
    def backward_s(self) -> float:
        """When the last gradient is there."""
        return self.ready_s[-1] if self.tensors else 0.0

    def payload_elems(self, numel: int) -> int:
        """Elements of one tensor that travel: ``max(1, floor(density * numel))``."""
        return min(numel, max(1, math.floor(self.density * numel)))

    def encode_s(self, tensors: Sequence[TensorSpec]) -> float:
        """Compression time of a group, encoded by one call."""
        return self.encode(sum(tensor.numel for tensor in tensors))

    def message_s(self, tensors: Sequence[TensorSpec]) -> float:
        """Time on the wire of a group."""
        return self.message(self.bytes_per_elem * sum(self.payload_elems(tensor.numel) for tensor in tensors))

    def relative_drift(self, other: Profile, groups: Groups | None = None) -> float:
        """How far ``other`` is from this profile: plans are redone beyond 0.15.

        The largest relative change among the time of backward and the sums of the groups' encode and message times.
        Sums, because the few microseconds of a bias may double without meaning anything for the plan.

        Args:
            other: what was measured later.
            groups: the groups in use; default: one per tensor.

        Returns:
            The change as a fraction of this profile; infinite when the tensors are not the same.
        """
        if set(self.specs) != set(other.specs):
            return math.inf
        used = [(tensor,) for tensor in self.specs] if groups is None else groups
        changes = [_relative_change(self.backward_s, other.backward_s)]
        changes.append(_relative_change(sum(map(self.encode_s, used)), sum(map(other.encode_s, used))))
        changes.append(_relative_change(sum(map(self.message_s, used)), sum(map(other.message_s, used))))
        return max(changes)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for messages and checkpoints."""
        return {
            "tensors": [_tensor_to_json(one) for one in self.tensors],
            "encode": self.encode.to_json(),
            "message": self.message.to_json(),
            "density": self.density,
            "bytes_per_elem": self.bytes_per_elem,
            "message_cost_s": self.message_cost_s,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Profile:
        """The profile that ``to_json`` described."""
        return cls(
            tensors=tuple(_tensor_from_json(one) for one in values["tensors"]),
            encode=Curve.from_json(values["encode"]),
            message=Curve.from_json(values["message"]),
            density=float(values["density"]),
            bytes_per_elem=float(values["bytes_per_elem"]),
            message_cost_s=float(values["message_cost_s"]),
        )


def _relative_change(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return abs(after - before) / before if before > 0 else math.inf


def _tensor_to_json(one: TensorProfile) -> dict[str, Any]:
    tensor = one.tensor
    return {
        "fqn": tensor.fqn,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "ready_s": one.ready_s,
    }


def _tensor_from_json(values: Mapping[str, Any]) -> TensorProfile:
    dtype = getattr(torch, values["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"the profile names the dtype {values['dtype']!r}, which this torch does not know")
    tensor = TensorSpec(values["fqn"], tuple(values["shape"]), dtype, torch.device(values["device"]))
    return TensorProfile(tensor, float(values["ready_s"]))
