"""What all sparsifiers share: some entries are selected, their values and positions are coded apart, in one message."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.places import FlatPlaces, Places
from thinwire.core import Codec, ConfigError, Payload, PayloadError, Schedule, Step, UnitSpec, memory
from thinwire.formats import positions, wire_format
from thinwire.kernels import Selected

_PIPED = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "int2", "int1", "float4", "pot4", "flint4")


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

    def places(self, unit: UnitSpec) -> Places:
        """How the positions of what ``select`` takes are written."""
        return FlatPlaces(unit.numel, self.indices)

    def split(self, x: Tensor, step: Step) -> tuple[Payload, Tensor]:
        return self.pack(self.select(x, step), self.places(step.unit))

    def pack(self, chosen: Selected, places: Places) -> tuple[Payload, Tensor]:
        """The message for what was chosen, and what it leaves behind."""
        encoded = wire_format(self.values).encode(chosen.values)
        payload = Payload(values=encoded.codes)
        if encoded.scales is not None:
            payload["scales"] = encoded.scales
        payload.update(places.pack(chosen.indices))
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
        return self.entries_bytes(self.selected_elems(unit), self.places(unit))

    def entries_bytes(self, count: int, places: Places) -> int:
        """Size of the message for ``count`` entries."""
        fmt = wire_format(self.values)
        sizes = {"values": (torch.uint8, fmt.code_bytes(count))}
        if fmt.scale_dtype is not None:
            sizes["scales"] = (fmt.scale_dtype, -(-count // fmt.block))
        return Payload.size(sizes | places.sizes(count))

    def _entries(self, payload: Payload, unit: UnitSpec) -> tuple[Tensor, Tensor]:
        return self.entries(payload, self.places(unit), self.selected_elems(unit))

    def entries(self, payload: Payload, places: Places, expected: int) -> tuple[Tensor, Tensor]:
        """Decoded values and their positions; ``expected`` of them, where the payload itself does not tell."""
        fmt = wire_format(self.values)
        if "values" not in payload or ("scales" in payload) != (fmt.scale_dtype is not None):
            raise PayloadError(f"not a sparse payload with {self.values} values: it holds {sorted(payload)}")
        # Two 4-bit codes share a byte, so the bytes do not tell an odd count.
        count = expected if fmt.bits < 8 else payload["values"].numel() * 8 // fmt.bits
        indices = places.unpack(payload, count)
        values = memory.empty(indices.numel(), device=indices.device)
        fmt.decode(payload["values"], payload.get("scales"), 1.0, values, False)
        return values, indices

    def __str__(self) -> str:
        if self.values not in _PIPED:  # no compressor has this name, so it cannot follow a bar
            return self._text(skip=())
        text = self._text(skip=("values",))
        return text if self.values == "fp32" else f"{text} | {self.values}"


def check_density(density: float) -> None:
    """Raise ConfigError unless 0 < density <= 1, at every step."""
    values = density.bounds if isinstance(density, Schedule) else (density,)
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"density is {density}; expected a fraction above 0 and at most 1, for example density=0.01")


def kept(density: float, numel: int) -> int:
    """k = max(1, floor(density · numel)); nothing of an empty tensor."""
    return min(numel, max(1, int(density * numel)))
