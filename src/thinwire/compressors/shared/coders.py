"""How shards are written and read: one at a time, or all rows of a message matrix at once where there are kernels for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import Reply, memory
from thinwire.formats import Encoded, WireFormat


class Written(NamedTuple):
    """Shards as rows of bytes behind some headroom (``memory.with_headroom``), and what was lost.

    ``finite`` is False where a kernel that looked found something that is not.
    """

    headroom: Tensor
    residual: Tensor
    finite: bool = True


class Coder(ABC):
    """How one unit is written in one step. ``first`` is the position of the first value in the unit: some coders treat
    the tensors of a unit differently."""

    @abstractmethod
    def encode(self, x: Tensor, first: int, generator: torch.Generator | None) -> Encoded: ...

    @abstractmethod
    def decode(self, message: Tensor, first: int, weight: float, out: Tensor, accumulate: bool) -> None: ...

    def write(
        self, x: Tensor, first: int, rows: int, generator: torch.Generator | None, residual: Tensor | None = None
    ) -> Written:
        """``x + residual`` as ``rows`` messages for shards of equal length."""
        encoded = self.encode(x if residual is None else x.add_(residual), first, generator)
        return Written(to_rows(encoded, rows), encoded.residual)

    def average(self, messages: Reply, first: int, out: Tensor) -> None:
        """The mean of what several ranks have written of the same shard."""
        for row, message in enumerate(messages):
            self.decode(message, first, 1 / len(messages), out, row > 0)

    def read(self, messages: Reply, out: Tensor) -> None:
        """The shards of a whole unit, one behind the other."""
        shard = out.numel() // len(messages)
        for message, first in zip(messages, range(0, out.numel(), shard), strict=True):
            self.decode(message, first, 1.0, out[first : first + shard], False)


@dataclass(frozen=True)
class FormatCoder(Coder):
    """The same format for all values, scales behind the codes of each shard."""

    format: WireFormat

    def encode(self, x: Tensor, first: int, generator: torch.Generator | None) -> Encoded:
        return self.format.encode(x, generator)

    def decode(self, message: Tensor, first: int, weight: float, out: Tensor, accumulate: bool) -> None:
        codes, scales = split_message(message, self.format, out.numel())
        self.format.decode(codes, scales, weight, out, accumulate)

    def write(
        self, x: Tensor, first: int, rows: int, generator: torch.Generator | None, residual: Tensor | None = None
    ) -> Written:
        fmt = self.format
        if fmt.by_rows is None or generator is not None:
            return super().write(x, first, rows, generator, residual)
        headroom = memory.with_headroom(rows, fmt.message_bytes(x.numel() // rows), x.device)
        messages = memory.behind_headroom(headroom)
        left, finite = kernels.encode_rows(x, residual, messages, bits=fmt.by_rows, block=fmt.block, out=x)
        return Written(headroom, left, finite)

    def average(self, messages: Reply, first: int, out: Tensor) -> None:
        fmt = self.format
        if fmt.by_rows is None:
            super().average(messages, first, out)
        else:
            weight = 1 / len(messages)
            kernels.sum_rows(_matrix(messages), out, bits=fmt.by_rows, block=fmt.block, weight=weight)

    def read(self, messages: Reply, out: Tensor) -> None:
        fmt = self.format
        if fmt.by_rows is None:
            super().read(messages, out)
        else:
            kernels.decode_rows(_matrix(messages), out, bits=fmt.by_rows, block=fmt.block)


def to_rows(encoded: Encoded, count: int) -> Tensor:
    """The codes and scales of ``count`` equal shards, one message per row, behind some headroom."""
    parts = [encoded.codes.view(count, -1)]
    if encoded.scales is not None:
        parts.append(encoded.scales.view(torch.uint8).view(count, -1))
    lengths = [part.shape[1] for part in parts]
    headroom = memory.with_headroom(count, sum(lengths), encoded.codes.device)
    for place, part in zip(memory.behind_headroom(headroom).split(lengths, dim=1), parts, strict=True):
        place.copy_(part)
    return headroom


def split_message(message: Tensor, fmt: WireFormat, numel: int) -> tuple[Tensor, Tensor | None]:
    """The codes and the scales of a shard of ``numel`` values."""
    codes, scales = message.split([fmt.code_bytes(numel), fmt.scale_bytes(numel)])
    return codes, None if fmt.scale_dtype is None else scales.view(fmt.scale_dtype)


def _matrix(messages: Reply) -> Tensor:
    """Process groups answer with a matrix already, simulators with one tensor per rank."""
    return messages if isinstance(messages, Tensor) else torch.stack(list(messages))
