"""Bank-balanced top-k, after Balanced Sparsity (AAAI'19) and Bank-Balanced Sparsity (FPGA'19), which prune weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared import shared_mask
from thinwire.compressors.shared.places import Places, bank_places
from thinwire.compressors.shared.sparse import Sparsifier, check_density
from thinwire.core import (
    Broadcast,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Payload,
    PayloadError,
    State,
    Step,
    UnitSpec,
    register,
)
from thinwire.kernels import Selected

_BANK_ELEMS = 256  # so that a position inside a bank is one byte
_MAX_BANK_ELEMS = 1 << 16  # two bytes


@dataclass(frozen=True)
class Banks:
    """Element i of the unit is in bank ``i % count``; each bank sends its ``k`` largest magnitudes."""

    count: int
    k: int
    numel: int

    @property
    def selected_elems(self) -> int:
        length, longer = divmod(self.numel, self.count)
        return longer * min(self.k, length + 1) + (self.count - longer) * min(self.k, length)


@register("bank")
@dataclass(frozen=True, kw_only=True)
class BankTopK(Sparsifier):
    """Cut the unit into strided banks and send the k largest magnitudes of each: a payload of constant size.

    Element i is in bank i mod nb. A bank has at most 256 elements, so a position inside it is one byte; its length is
    k / density with k = max(1, floor(256·density)), longer (and a position two bytes) below density 1/256. Per bank,
    ‖residual‖² ≤ (1 - k / length)·‖x‖². nb is odd and coprime to the row lengths of all tensors: a bank that kept to a few
    columns would have to choose among entries of one kind.

    The banks run through all tensors that travel together, so these compete for the budget as in a global top-k and, unlike
    ``topk``, *the result depends on the grouping*. The selection is the cited papers' for weights; using it on gradients,
    and the shared mask, are this project's own.

    Args:
        density: fraction of the entries to send. Lower: fewer bytes, older updates.
        mode: ``gather``: every rank sends its own choice. ``shared``: rank (step mod world size) chooses for all and
            broadcasts the positions, the values are averaged by all-reduce; the volume does not grow with the world.
    """

    scheduled = ("density",)

    density: float = 0.01
    mode: str = "gather"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if self.mode not in ("gather", "shared"):
            raise ConfigError(f"bank: mode is {self.mode!r}; expected 'gather' or 'shared'")
        if self.indices != "auto":
            raise ConfigError(f"bank: indices is {self.indices!r}; positions are written inside banks, leave it out")
        if self.mode == "shared":
            shared_mask.check_values("bank", self.values)

    def select(self, x: Tensor, step: Step) -> Selected:
        banks = self._banks(step.unit)
        return kernels.bank_topk(x, None, (0, x.numel()), (banks.count,), banks.k, out=x)

    def selected_elems(self, unit: UnitSpec) -> int:
        return self._banks(unit).selected_elems

    def places(self, unit: UnitSpec) -> Places:
        banks = self._banks(unit)
        return bank_places((0, unit.numel), (banks.count,), banks.k, unit.device)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        if self.mode == "gather":
            return (yield from super().exchange(x, state, step))
        return (yield from self.at(step.index)._shared(x, state, step))

    def _shared(self, x: Tensor, state: State, step: Step) -> Exchange:
        """The leader's positions to all, then the mean of the values there."""
        places, leader = self.places(step.unit), step.index % step.world_size
        mine = self._positions(x, step, places) if step.rank == leader else self._no_positions(step.unit, places)
        received = yield Broadcast(mine, leader)
        indices = self._read_positions(received, step.unit, places)
        done: Exchanged = yield from shared_mask.mean_at(x, indices.long(), self.values, step)
        return done._replace(state=state)

    def _positions(self, x: Tensor, step: Step, places: Places) -> Tensor:
        banks = self._banks(step.unit)
        chosen = kernels.bank_topk(x, None, (0, x.numel()), (banks.count,), banks.k)  # leaves x as it is
        packed = places.pack(chosen.indices)
        return torch.cat([*packed.values(), x.new_empty(0, dtype=torch.uint8)])

    def _no_positions(self, unit: UnitSpec, places: Places) -> Tensor:
        return torch.zeros(_bytes(places, self.selected_elems(unit)), dtype=torch.uint8, device=unit.device)

    def _read_positions(self, message: Tensor, unit: UnitSpec, places: Places) -> Tensor:
        count = self.selected_elems(unit)
        sizes = places.sizes(count)
        if message.numel() != _bytes(places, count):
            raise PayloadError(f"positions in banks take {_bytes(places, count)} bytes, got {message.numel()}")
        parts = message.split([numel for _, numel in sizes.values()]) if sizes else ()
        return places.unpack(Payload(zip(sizes, parts, strict=True), values=message), count)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        if self.mode == "gather":
            return super().wire_bytes(unit, world_size)
        count = self.selected_elems(unit)
        mask_bytes = (world_size - 1) * _bytes(self.places(unit), count) // world_size
        return mask_bytes + shared_mask.mean_bytes(count, self.values, world_size)

    def _banks(self, unit: UnitSpec) -> Banks:
        return plan_banks(unit.numel, self.density, tuple(tensor.matrix_shape[1] for tensor in unit.tensors))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [
            cls(density=0.05, values="bf16"),
            cls(density=0.05, mode="shared"),
            cls(density=0.1, mode="shared", values="int2"),
        ]


@lru_cache(maxsize=256)
def plan_banks(numel: int, density: float, row_lengths: tuple[int, ...]) -> Banks:
    """How many banks a unit has and what each sends."""
    k = max(1, int(density * min(_BANK_ELEMS, numel)))
    # The tolerance keeps 256·(1/256) from becoming 257 elements by rounding, and its position from becoming two bytes.
    length = min(_MAX_BANK_ELEMS, max(k, math.floor(k / density * (1 + 1e-12))))
    count = max(1, -(-numel // length)) | 1
    period = math.lcm(*(row_length for row_length in row_lengths if row_length))
    while math.gcd(count, period) > 1:
        count += 2
    # In a small unit one bank more makes all of them noticeably shorter.
    return Banks(count, max(1, round(density * numel / count)), numel)


def _bytes(places: Places, count: int) -> int:
    return sum(dtype.itemsize * numel for dtype, numel in places.sizes(count).values())
