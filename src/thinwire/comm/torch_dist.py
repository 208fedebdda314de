"""A process group of torch.distributed as transport: gloo on CPU, NCCL on GPUs.

Only collectives that both backends have, on dtypes that both have, are used; everything else is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm import pairs
from thinwire.comm.liveness import Liveness, default_timeout
from thinwire.comm.transport import Later, Pending, Tag
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Reply, Request, TransportError, memory
from thinwire.core.request import Partition, alone

# Renamed in torch 2.13; the old name warns there, the new one is missing before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
GLOO_LANES = 2  # process groups: one for the first round of each fusion group, one for its second
_SHORT_BYTES = 32 << 10  # of a message of which the hops cost more than the bytes
_LENGTH_BYTES = 8  # of an announced length
_SLICE = timedelta(seconds=1)  # of a wait, after which it is asked whether all ranks are alive
_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchDistTransport:
    """Answers requests over ``group`` (default: the whole world).

    Use a group of its own, not one that other code talks on: the order of messages on it belongs to thinwire.

    Args:
        liveness: tells a slow rank from a dead one, on gloo; without it waits last as long as the group's time-out.
        later: groups over the same ranks, one for each further lane. With gloo they work side by side; with NCCL, whose
            communicators must be used in the same order everywhere, there must be none.
        owned: ``close`` destroys these groups, not only those made here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        liveness: Liveness | None = None,
        later: Sequence[dist.ProcessGroup] = (),
        *,
        owned: bool = False,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.liveness = liveness
        self._patience = None if liveness is None else default_timeout()
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self._owned = [one for one in (self.group, *later) if owned and one is not None]
        self._parts: dict[Partition, TorchDistTransport | None] = {}
        self._has_gloo = "gloo" in dist.get_backend(self.group)
        self._last_pairs: pairs.PairwiseAllToAll | None = None
        self._later = [TorchDistTransport(one, liveness) for one in later]

    @property
    def lanes(self) -> int:
        return 1 + len(self._later)

    def start(self, request: Request, tag: Tag) -> Pending:
        if self._later and tag.round > 0 and request.partition is None:
            return self._later[min(tag.round, len(self._later)) - 1].start(request, tag)
        try:
            return self._start(request, tag)
        except RuntimeError as error:
            raise self.failure(error, request, tag) from error

    def close(self) -> None:
        """Destroy the process groups that belong to this transport: each holds sockets and threads."""
        if self._owned and self.liveness is not None:
            self.liveness.close()
        for part in self._parts.values():
            if part is not None:
                part.close()
        for group in self._owned:
            # Those of a job that was torn down as a whole are gone already.
            with suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        self._owned, self._parts = [], {}

    def failure(self, error: RuntimeError, request: Request, tag: Tag) -> TransportError:
        """What went wrong, with the rank that is missing."""
        return TransportError(
            f"{type(request).__name__} failed on rank {self.rank} in {tag}: {error}. {self._roll_call()} "
            "Look at the log of the rank that died, stalled or left, then restart from the last checkpoint."
        )

    def _roll_call(self) -> str:
        return "Some rank is missing." if self.liveness is None else self.liveness.roll_call()

    def await_work(self, work: _Work, tensor: Tensor) -> None:
        """Until a collective has ended; as long as all ranks are alive.

        Raises:
            RuntimeError: it failed, or a rank has been silent for too long.
        """
        if self.liveness is None or not self._is_gloo(tensor):
            work.wait()
            return
        while True:
            try:
                work.wait(_SLICE)
                self.liveness.forget()
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            missing = self.liveness.missing()
            if missing:
                self._break()
                names = ", ".join(map(str, missing))
                raise RuntimeError(f"no sign of life from rank {names} for {self.liveness.silence_s:g} s")

    def _break(self) -> None:
        """Close the connections: what still waits inside gloo, in whatever thread, ends now and not at its time-out."""
        other = (self.rank + 1) % self.world_size
        try:
            work: Any = dist.irecv(torch.empty(1), group=self.group, group_src=other)
            work.wait(timedelta(milliseconds=1))  # gloo answers a receive that times out by closing all pairs
        except RuntimeError:
            pass

    def _start(self, request: Request, tag: Tag) -> Pending:
        if request.partition is not None:
            part, within = self._part(request.partition), replace(request, partition=None)
            return Later(lambda: alone(within)) if part is None else part._start(within, tag)
        sent_bytes = request.sent_bytes(self.world_size)
        match request:
            case AllReduce():
                work = dist.all_reduce(request.tensor, _OPS[request.op], group=self.group, async_op=True)
                return _Running(self, request, tag, work, request.tensor, sent_bytes)
            case AllGather(varying=True):
                length = torch.tensor([request.message.numel()], dtype=torch.int64, device=request.message.device)
                return _Varying(self, request, tag, *self._all_gather(length))
            case AllGather():
                return _Running(self, request, tag, *self._all_gather(request.message), sent_bytes)
            case AllToAll():
                return _Running(self, request, tag, *self._all_to_all(request.messages), sent_bytes)
            case Broadcast():
                source = dist.get_global_rank(self.group, request.source) if self.group else request.source
                work = dist.broadcast(request.tensor, source, group=self.group, async_op=True)
                return _Running(self, request, tag, work, request.tensor, sent_bytes)

    def _part(self, partition: Partition) -> TorchDistTransport | None:
        """This rank's group of a partition, None where it is alone; all ranks make all groups when they first need one.

        Requests come in the same order everywhere, so no rank can be making another group at that time. Ranks that are
        alone join in: torch numbers groups by how many a rank has made, and the numbers must stay the same everywhere.
        """
        if partition not in self._parts:
            if self.world_size != dist.get_world_size():
                raise TransportError(
                    f"partitions of ranks need a transport over all {dist.get_world_size()} ranks, this one has "
                    f"{self.world_size}; leave out hierarchical, or attach on all ranks"
                )
            timeout = _timeout(self.group)
            made = [dist.new_group(list(ranks), timeout=timeout) for ranks in partition.members if len(ranks) > 1]
            own = [TorchDistTransport(group, owned=True) for group in made if dist.get_rank(group) >= 0]
            self._parts[partition] = own[0] if own else None
        return self._parts[partition]

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._has_gloo and tensor.device.type == "cpu"

    def _all_to_all(self, messages: Tensor) -> tuple[_Work, Tensor]:
        messages = messages.contiguous()
        reply = memory.empty(messages.shape, messages.dtype, messages.device)
        if self._is_gloo(messages) and messages[0].nbytes >= pairs.FROM_BYTES and self.world_size > 2:
            self._last_pairs = pairs.PairwiseAllToAll(messages, reply, self.group, self._last_pairs, self._patience)
            return self._last_pairs, reply
        return dist.all_to_all_single(reply, messages, group=self.group, async_op=True), reply

    def _all_gather(self, message: Tensor) -> tuple[_Work, Tensor]:
        out = memory.empty((self.world_size, message.numel()), message.dtype, message.device)
        if self._is_gloo(message) and message.nbytes <= _SHORT_BYTES:
            # gloo gathers around a ring, and each hop has to wake a rank; sent to everybody at once there is one hop.
            return self._all_to_all(out.copy_(message.reshape(1, -1)))
        return _all_gather(out.view(-1), message.contiguous(), group=self.group, async_op=True), out


class _Work(Protocol):
    """A collective of torch, or one of ``pairs``."""

    def wait(self, timeout: timedelta = ..., /) -> Any: ...

    def is_completed(self) -> bool: ...


@dataclass(slots=True)
class _Running:
    """A collective under way. It keeps the request: memory that a collective reads must not be given away."""

    transport: TorchDistTransport
    request: Request
    tag: Tag
    work: _Work
    result: Tensor
    sent_bytes: int

    def wait(self) -> Tensor:
        try:
            self.transport.await_work(self.work, self.result)
        except RuntimeError as error:
            raise self.transport.failure(error, self.request, self.tag) from error
        is_mean = isinstance(self.request, AllReduce) and self.request.op == "mean"
        return self.result.div_(self.transport.world_size) if is_mean else self.result


@dataclass(slots=True)
class _Varying:
    """A gather of unequal lengths: first the lengths, then messages padded to the longest."""

    transport: TorchDistTransport
    request: AllGather
    tag: Tag
    work: _Work
    lengths: Tensor
    sent_bytes: int = 0

    def wait(self) -> Reply:
        transport, message = self.transport, self.request.message
        try:
            transport.await_work(self.work, self.lengths)
            sizes = self.lengths.view(-1).tolist()
            # Rounded up so that every rank's message starts aligned in the common buffer.
            longest = -(-max(sizes) // 8) * 8
            work, rows = transport._all_gather(memory.padded(message, longest))
            transport.await_work(work, rows)
        except RuntimeError as error:
            raise transport.failure(error, self.request, self.tag) from error
        self.sent_bytes = (transport.world_size - 1) * (_LENGTH_BYTES + longest)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _timeout(group: Any) -> timedelta | None:
    """How long this group waits for a rank; None where its backend does not tell."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
