"""What sparsifiers share whose count of sent entries depends on the data, so that it differs between ranks and steps."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.compressors.shared.sparse import Sparsifier
from thinwire.core import AllGather, ConfigError, Payload, Request, Step
from thinwire.formats import wire_format
from thinwire.kernels import Selected


@dataclass(frozen=True, kw_only=True)
class VaryingSparsifier(Sparsifier):
    """Base of these sparsifiers: lengths are exchanged before the messages, and ``wire_bytes`` is an estimate."""

    varying = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if wire_format(self.values).bits < 8:
            raise ConfigError(
                f"{self.name}: {self.values} values need a count known beforehand; use int8, fp16, bf16 or fp32"
            )

    @property
    def exact_bytes(self) -> bool:
        return False

    def average(self, chosen: Selected, step: Step) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """Send what was chosen; the mean, and what this rank keeps. For methods that choose with a state of their own."""
        payload, residual = self.pack(chosen, self.places(step.unit))
        gathered = yield AllGather(payload.to_bytes(), varying=True)
        return self.combine([Payload.from_bytes(message) for message in gathered], step), residual
