"""What a group costs to encode and to send, as far as a fusion planner looks: two curves and a density."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion.curve import Curve


@dataclass(frozen=True)
class GroupCosts:
    """One compressor on one network; ``plan.price`` derives it from what was measured.

    Args:
        encode: compression time (encode and decode) of a group by its number of elements.
        message: time of one message by the payload bytes of its group.
        density: payload elements per element.
        bytes_per_elem: payload bytes per payload element (value and index).

    Raises:
        ConfigError: a density or element size that makes no sense.
    """

    encode: Curve
    message: Curve
    density: float = 1.0
    bytes_per_elem: float = 4.0

    def __post_init__(self) -> None:
        if not (0 < self.density <= 1 and 0 < self.bytes_per_elem < math.inf):
            raise ConfigError(
                f"density is {self.density} and bytes_per_elem {self.bytes_per_elem}; "
                "expected 0 < density <= 1 and bytes_per_elem > 0"
            )

    def payload_elems(self, numel: int) -> int:
        """Elements of one tensor that travel: ``max(1, floor(density * numel))``."""
        return min(numel, max(1, math.floor(self.density * numel)))

    def encode_s(self, tensors: Sequence[TensorSpec]) -> float:
        """Compression time of a group, encoded by one call."""
        return self.encode(sum(tensor.numel for tensor in tensors))

    def message_s(self, tensors: Sequence[TensorSpec]) -> float:
        """Time on the wire of a group."""
        return self.message(self.bytes_per_elem * sum(self.payload_elems(tensor.numel) for tensor in tensors))
