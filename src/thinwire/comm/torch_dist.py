"""A process group of torch.distributed as transport: gloo on CPU, NCCL on GPUs.

Only collectives that both backends have, on dtypes that both have, are used; everything else is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm import pairs
from thinwire.comm.transport import Later, Pending, Tag
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Reply, Request, TransportError, memory
from thinwire.core.request import Partition, alone

# Renamed in torch 2.13; the old name warns there, the new one is missing before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
GLOO_LANES = 2  # process groups: one for the first round of each fusion group, one for its second
_SHORT_BYTES = 32 << 10  # of a message of which the hops cost more than the bytes
_ROLL_CALL = timedelta(seconds=10)
_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchDistTransport:
    """Answers requests over ``group`` (default: the whole world).

    Use a group of its own, not one that other code talks on: the order of messages on it belongs to thinwire.

    Args:
        roll_call: a gloo group over the same ranks, used only after a failure, to find out which rank is missing.
        later: groups over the same ranks, one for each further lane. With gloo they work side by side; with NCCL, whose
            communicators must be used in the same order everywhere, there must be none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        roll_call: dist.ProcessGroup | None = None,
        later: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.roll_call = roll_call
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self._parts: dict[Partition, TorchDistTransport | None] = {}
        self._has_gloo = "gloo" in dist.get_backend(self.group)
        self._last_pairs: pairs.PairwiseAllToAll | None = None
        self._later = [TorchDistTransport(one, roll_call) for one in later]

    @property
    def lanes(self) -> int:
        return 1 + len(self._later)

    def start(self, request: Request, tag: Tag) -> Pending:
        if self._later and tag.round > 0 and request.partition is None:
            return self._later[min(tag.round, len(self._later)) - 1].start(request, tag)
        try:
            pending = self._start(request)
        except RuntimeError as error:
            raise self._failure(error, request, tag) from error
        return Later(lambda: self._finish(pending, request, tag))

    def _finish(self, pending: Pending, request: Request, tag: Tag) -> Reply:
        try:
            return pending.wait()
        except RuntimeError as error:
            raise self._failure(error, request, tag) from error

    def _failure(self, error: RuntimeError, request: Request, tag: Tag) -> TransportError:
        return TransportError(
            f"{type(request).__name__} failed on rank {self.rank} in {tag}: {error}. {self._call_roll()} "
            "Look at the log of the rank that died, stalled or left, then restart from the last checkpoint."
        )

    def _call_roll(self) -> str:
        """Who does not answer. gloo by itself reports a stalled rank only as a time-out, without its name."""
        if self.roll_call is None:
            return "Some rank is missing."
        try:
            dist.monitored_barrier(self.roll_call, timeout=_ROLL_CALL, wait_all_ranks=True)
        except RuntimeError as error:
            return f"Roll call: {error}."
        return "Roll call: all ranks answer, so the link was interrupted or a rank was late by more than the time-out."

    def _start(self, request: Request) -> Pending:
        if request.partition is not None:
            part, within = self._part(request.partition), replace(request, partition=None)
            return Later(lambda: alone(within)) if part is None else part._start(within)
        match request:
            case AllReduce():
                return self._all_reduce(request)
            case AllGather(varying=True):
                return self._all_gather_varying(request.message)
            case AllGather():
                return self._all_gather(request.message)
            case AllToAll():
                return self._all_to_all(request.messages)
            case Broadcast():
                source = dist.get_global_rank(self.group, request.source) if self.group else request.source
                work = dist.broadcast(request.tensor, source, group=self.group, async_op=True)
                return Later(lambda: _after(work, request.tensor))

    def _part(self, partition: Partition) -> TorchDistTransport | None:
        """This rank's group of a partition, None where it is alone; all ranks make all groups when they first need one.

        Requests come in the same order everywhere, so no rank can be making another group at that time. Ranks that are
        alone join in: torch numbers groups by how many a rank has made, and the numbers must stay the same everywhere.
        """
        if partition not in self._parts:
            if self.world_size != dist.get_world_size():
                raise TransportError(
                    f"groups of ranks need a transport over all {dist.get_world_size()} ranks, this one has "
                    f"{self.world_size}; leave out hierarchical, or attach on all ranks"
                )
            timeout = _timeout(self.group)
            made = [dist.new_group(list(ranks), timeout=timeout) for ranks in partition.members if len(ranks) > 1]
            own = [TorchDistTransport(group) for group in made if dist.get_rank(group) >= 0]
            self._parts[partition] = own[0] if own else None
        return self._parts[partition]

    def _all_reduce(self, request: AllReduce) -> Later:
        work = dist.all_reduce(request.tensor, _OPS[request.op], group=self.group, async_op=True)

        def finish() -> Reply:
            _after(work, request.tensor)
            return request.tensor.div_(self.world_size) if request.op == "mean" else request.tensor

        return Later(finish)

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._has_gloo and tensor.device.type == "cpu"

    def _all_to_all(self, messages: Tensor) -> Pending:
        reply = memory.empty(messages.shape, messages.dtype, messages.device)
        if self._is_gloo(messages) and messages[0].nbytes >= pairs.FROM_BYTES and self.world_size > 2:
            self._last_pairs = pairs.PairwiseAllToAll(messages.contiguous(), reply, self.group, self._last_pairs)
            return self._last_pairs
        work = dist.all_to_all_single(reply, messages.contiguous(), group=self.group, async_op=True)
        return Later(lambda: _after(work, reply))

    def _all_gather(self, message: Tensor) -> Pending:
        if self._is_gloo(message) and message.nbytes <= _SHORT_BYTES:
            # gloo gathers around a ring, and each hop has to wake a rank; sent to everybody at once there is one hop.
            copies = memory.empty((self.world_size, message.numel()), message.dtype, message.device)
            return self._all_to_all(copies.copy_(message.reshape(1, -1)))
        out = memory.empty((self.world_size, message.numel()), message.dtype, message.device)
        work = _all_gather(out.view(-1), message.contiguous(), group=self.group, async_op=True)
        return Later(lambda: _after(work, out))

    def _all_gather_varying(self, message: Tensor) -> Pending:
        """First the lengths, then messages padded to the longest; nothing is split evenly by assumption."""
        length = torch.tensor([message.numel()], dtype=torch.int64, device=message.device)
        lengths = self._all_gather(length)

        def finish() -> Reply:
            sizes = [int(one) for one in lengths.wait()]
            # Rounded up so that every rank's message starts aligned in the common buffer.
            longest = -(-max(sizes) // 8) * 8
            padded = memory.padded(message, longest)
            rows = self._all_gather(padded).wait()
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]

        return Later(finish)


def _timeout(group: Any) -> timedelta | None:
    """How long this group waits for a rank; None where its backend does not tell."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _after(work: Any, result: Tensor) -> Tensor:
    work.wait()
    return result
