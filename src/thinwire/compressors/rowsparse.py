"""Row-sparse reduction for embeddings: only rows that some rank has touched travel, and owners share the work evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.sparse import check_density
from thinwire.core import AllGather, AllToAll, Compressor, Exchange, Exchanged, State, Step, UnitSpec, register


@register("rowsparse")
@dataclass(frozen=True, kw_only=True)
class RowSparse(Compressor):
    """Average gradients that are zero in most rows, without loss: rows that nobody touched are not sent.

    (1) All tell which rows they touched, one bit per row. From that everybody knows who owns which rows and how long all
    messages are: no positions and no counts are sent. (2) Each rank sends its rows to their owners, who add them up in rank
    order. (3) Owners give the sums to all. Rows are dealt out by cumulative work, not by number: frequent tokens lie close
    together in a vocabulary, and a rank that owned many of them would make all others wait. Scheme and balance are ours.

    A tensor that is touched everywhere costs what ``dense`` costs, and one bit per row more.

    Args:
        density: fraction of the rows expected to be touched by one rank; used for estimates only.
    """

    density: float = 0.1

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def exact_bytes(self) -> bool:
        return False

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        gathered = yield AllGather(kernels.pack_bits(_touched(x, step.unit)))
        plan = Plan(
            torch.stack([kernels.unpack_bits(bits, _rows(step.unit)) for bits in gathered]), _row_elems(step.unit)
        )
        rows = yield AllToAll(_to_owners(x, plan, step.rank))
        sums = _owned_sums(rows, plan, step.rank)
        gathered = yield AllGather(_padded(sums / step.world_size, plan.gathered_elems))
        parts = [_floats(part)[:length] for part, length in zip(gathered, plan.owned_elems, strict=True)]
        mean = torch.zeros_like(x)
        mean[plan.anywhere] = torch.cat(parts)
        return Exchanged(mean, None, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        bits = -(-_rows(unit) // 8)
        rows = unit.dense_bytes * (self.density + min(1.0, world_size * self.density)) / world_size
        return (world_size - 1) * (bits + int(rows))

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls()]


@dataclass(frozen=True, eq=False)
class Plan:
    """Who owns which rows, and how long the messages are; the same on all ranks.

    Args:
        touched: which rows each rank has touched [ranks, rows].
        row_elems: elements of each row.
    """

    touched: Tensor
    row_elems: Tensor

    @cached_property
    def owner(self) -> Tensor:
        """The owner of each row: rows are cut where the work so far reaches the next rank's share.

        A row is work for its owner once per rank that sends it, and world_size times when it goes out to all.
        """
        world_size = self.touched.shape[0]
        senders = self.touched.sum(dim=0)
        work = (senders + world_size * (senders > 0)) * self.row_elems
        before = work.cumsum(0) - work
        return (before * world_size // work.sum().clamp(min=1)).clamp(max=world_size - 1)

    @cached_property
    def sent_elems(self) -> list[list[int]]:
        """Elements that each rank sends to each owner."""
        return [self._per_owner(rows) for rows in self.touched]

    @cached_property
    def owned_elems(self) -> list[int]:
        """Elements of the sums of each owner."""
        return self._per_owner(self.touched.any(dim=0))

    @property
    def row_message_elems(self) -> int:
        return max(map(max, self.sent_elems))

    @property
    def gathered_elems(self) -> int:
        return max(self.owned_elems)

    @cached_property
    def anywhere(self) -> Tensor:
        """Which elements lie in a row that some rank has touched."""
        return self.elements(self.touched.any(dim=0))

    def elements(self, rows: Tensor) -> Tensor:
        """A mask of rows as a mask of elements."""
        return rows.repeat_interleave(self.row_elems)

    def _per_owner(self, rows: Tensor) -> list[int]:
        counts = torch.zeros(self.touched.shape[0], dtype=torch.int64, device=rows.device)
        return counts.index_add_(0, self.owner, self.row_elems * rows).tolist()


def _rows(unit: UnitSpec) -> int:
    return sum(tensor.matrix_shape[0] for tensor in unit.tensors)


def _row_elems(unit: UnitSpec) -> Tensor:
    device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
    shapes = torch.tensor([tensor.matrix_shape for tensor in unit.tensors], device=device).view(-1, 2)
    return shapes[:, 1].repeat_interleave(shapes[:, 0])


def _touched(x: Tensor, unit: UnitSpec) -> Tensor:
    """Which rows hold anything but zeros."""
    parts = zip(unit.tensors, x.split(unit.sizes), strict=True)
    return torch.cat([part.view(tensor.matrix_shape).any(dim=1) for tensor, part in parts])


def _to_owners(x: Tensor, plan: Plan, rank: int) -> Tensor:
    """The touched rows of this rank as one message per owner."""
    parts = x[plan.elements(plan.touched[rank])].split(plan.sent_elems[rank])
    return torch.stack([_padded(part, plan.row_message_elems) for part in parts])


def _owned_sums(rows: Sequence[Tensor] | Tensor, plan: Plan, rank: int) -> Tensor:
    """Sums over the ranks, in rank order, of the rows that ``rank`` owns and somebody has touched."""
    mine = plan.owner == rank
    own_elems = plan.row_elems[mine]
    total = torch.zeros(int(own_elems.sum()), device=own_elems.device)
    for row, touched, lengths in zip(rows, plan.touched, plan.sent_elems, strict=True):
        total[touched[mine].repeat_interleave(own_elems)] += _floats(row)[: lengths[rank]]
    return total[plan.touched[:, mine].any(dim=0).repeat_interleave(own_elems)]


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.numel())).view(torch.uint8)


def _floats(message: Tensor) -> Tensor:
    """Bytes as fp32; copied, because a message may begin anywhere in a larger one."""
    return message.clone().view(torch.float32)
