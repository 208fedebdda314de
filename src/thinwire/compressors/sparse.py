"""What all sparsifiers share: some entries are selected, their values and positions are coded apart, in one message."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import Codec, ConfigError, Payload, PayloadError, Step, UnitSpec
from thinwire.kernels import Selected
from thinwire.precision import positions, wire_format

_PIPED = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "float4", "pot4", "flint4")


@dataclass(frozen=True, kw_only=True)
class Sparsifier(Codec):
    """Base of the sparsifiers: subclasses say which entries to send.

    Args:
        values: format of the sent values; its rounding error stays in the residual.
        indices: coding of the positions; ``auto`` takes the smallest.
    """

    feedback = True

    values: str = "fp32"
    indices: str = "auto"

    def __post_init__(self) -> None:
        wire_format(self.values)
        positions.resolve(self.indices, 0, 0)

    @property
    def sparse(self) -> bool:
        return True

    @abstractmethod
    def select(self, x: Tensor, step: Step) -> Selected:
        """Choose entries of ``x``. The residual may be written over ``x``."""

    @abstractmethod
    def selected_elems(self, unit: UnitSpec) -> int:
        """How many entries ``select`` takes (an estimate where that depends on the data)."""

    def split(self, x: Tensor, step: Step) -> tuple[Payload, Tensor]:
        chosen = self.select(x, step)
        encoded = wire_format(self.values).encode(chosen.values)
        payload = Payload(values=encoded.codes)
        if encoded.scales is not None:
            payload["scales"] = encoded.scales
        payload.update(positions.pack(chosen.indices, step.unit.numel, self.indices))
        if self.values != "fp32":
            chosen.residual[chosen.indices.long()] = encoded.residual
        return payload, chosen.residual

    def encode(self, x: Tensor, step: Step) -> Payload:
        return self.split(x.clone(), step)[0]

    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor:
        return kernels.scatter_mean([self._entries(payload, unit)], unit.numel, world_size=1)

    def combine(self, payloads: Sequence[Payload], step: Step) -> Tensor:
        entries = [self._entries(payload, step.unit) for payload in payloads]
        return kernels.scatter_mean(entries, step.unit.numel, world_size=len(payloads))

    def payload_bytes(self, unit: UnitSpec) -> int:
        count, fmt = self.selected_elems(unit), wire_format(self.values)
        sizes = {"values": (torch.uint8, fmt.code_bytes(count))}
        if fmt.scale_dtype is not None:
            sizes["scales"] = (fmt.scale_dtype, -(-count // fmt.block))
        return Payload.size(sizes | positions.sizes(self.indices, count, unit.numel))

    def _entries(self, payload: Payload, unit: UnitSpec) -> tuple[Tensor, Tensor]:
        """Decoded values and their positions."""
        fmt = wire_format(self.values)
        if "values" not in payload or ("scales" in payload) != (fmt.scale_dtype is not None):
            raise PayloadError(f"not a sparse payload with {self.values} values: it holds {sorted(payload)}")
        indices = positions.unpack(payload, self._count(payload, unit), unit.numel)
        values = torch.empty(indices.numel(), device=indices.device)
        fmt.decode(payload["values"], payload.get("scales"), 1.0, values, False)
        return values, indices

    def _count(self, payload: Payload, unit: UnitSpec) -> int:
        """How many values the payload holds (two 4-bit codes share a byte, so an odd count is asked of the positions)."""
        bits = wire_format(self.values).bits
        count = payload["values"].numel() * 8 // bits
        return self.selected_elems(unit) if bits < 8 else count

    def __str__(self) -> str:
        if self.values not in _PIPED:  # no compressor has this name, so it cannot follow a bar
            return self._text(skip=())
        text = self._text(skip=("values",))
        return text if self.values == "fp32" else f"{text} | {self.values}"


def check_density(density: float) -> None:
    """Raise ConfigError unless 0 < density <= 1."""
    if not 0 < density <= 1:
        raise ConfigError(f"density is {density}; expected a fraction above 0 and at most 1, for example density=0.01")


def kept(density: float, numel: int) -> int:
    """k = max(1, floor(density · numel)); nothing of an empty tensor."""
    return min(numel, max(1, int(density * numel)))
