"""The messages of a fusion group, predicted by the rules that ``comm.merge`` sends them by, without a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.comm.framing import HEADER_BYTES
from thinwire.comm.merge import aligned, batches
from thinwire.comm.piggyback import Kind, carrier, kind_of, riders
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Request

_KINDS: dict[type, Kind] = {AllReduce: "all_reduce", AllGather: "all_gather", AllToAll: "all_to_all"}
_ALONE = "alone"


class Asked(NamedTuple):
    """One request of a compressor, whatever the size of the unit.

    Args:
        share: of all bytes that the compressor sends.
        form: what besides the kind must be equal for two requests to be merged: operator and dtype of a reduction.
            ``alone`` for what is never merged.
        carries: it can carry flags, or be piggybacked (``piggyback.kind_of``).
    """

    kind: Kind
    share: float
    form: str = ""
    carries: bool = True

    @classmethod
    def of(cls, request: Request, world_size: int, total_bytes: int) -> list[Asked]:
        """What a real request is, where the compressor sends ``total_bytes`` in all."""
        kind, carries = _KINDS.get(type(request), "broadcast"), kind_of(request) is not None
        share = request.sent_bytes(world_size) / total_bytes
        form = "" if request.partition is None else "among some ranks"
        match request:
            case AllReduce():
                # Probes of earlier releases have no forms: plain means, by far the most, must be merged with theirs.
                form += f"{request.op} {request.tensor.dtype}".removesuffix("mean torch.float32")
            case AllGather(varying=True):
                return [cls(kind, 0.0, _ALONE, False), cls(kind, share, _ALONE, False)]  # lengths go first
            case Broadcast():
                form = _ALONE
        return [cls(kind, share, form, carries)]

    def nbytes(self, sent_bytes: int, world_size: int) -> int:
        """Of the tensor that is reduced or broadcast, the message that is gathered or one row of an all-to-all.

        Args:
            sent_bytes: by the compressor in all.
        """
        sent, others = self.share * sent_bytes, max(world_size - 1, 1)
        match self.kind:
            case "all_reduce":  # what a ring sends of it was rounded down; a little less, since shares are not exact
                return math.ceil(sent * world_size / (2 * others) - 1e-6)
            case "broadcast":
                return math.ceil(sent * world_size / others - 1e-6)
            case _:
                return round(sent / others)

    @property
    def flag_bytes(self) -> int:
        """Of one flag that this carries."""
        if self.kind != "all_reduce":
            return 1
        dtype = getattr(torch, self.form.rpartition(".")[2], torch.float32)
        return int(dtype.itemsize)


def merged_round(
    asked: Sequence[tuple[Asked, int]], world_size: int, flags: int | None = None
) -> list[tuple[Kind, int]]:
    """The messages of one round, in order: kind, and bytes that one rank sends.

    Args:
        asked: by all units of the group, with ``Asked.nbytes``.
        flags: how many travel with this round (``flag_elems``); None: none do.
    """
    kinds, sizes = [one.kind if one.carries else None for one, _ in asked], [nbytes for _, nbytes in asked]
    along = riders(kinds, sizes, world_size)
    parts: list[tuple[Asked, int]] = [
        (Asked("all_to_all", 0.0), nbytes) if position in along else (one, nbytes)
        for position, (one, nbytes) in enumerate(asked)
    ]
    if flags is not None:
        kind = carrier(kinds, sizes)
        beside = next((one for one, _ in asked if one.carries and one.kind == kind), Asked("all_gather", 0.0))
        parts.append((beside, flags * beside.flag_bytes))
    forms = [(one.kind, one.form, position if one.form == _ALONE else 0) for position, (one, _) in enumerate(parts)]
    return [_message([parts[position] for position in batch], world_size) for batch in batches(forms)]


def _message(parts: Sequence[tuple[Asked, int]], world_size: int) -> tuple[Kind, int]:
    kind = parts[0][0].kind
    if kind in ("all_gather", "all_to_all"):
        padded = sum(aligned(nbytes) for _, nbytes in parts) if len(parts) > 1 else parts[0][1]
        return kind, (world_size - 1) * (HEADER_BYTES + padded)
    copies = 2 if kind == "all_reduce" else 1
    return kind, copies * (world_size - 1) * sum(nbytes for _, nbytes in parts) // world_size
