"""One averaging: begun, filled, closed, then committed on all ranks or aborted on all ranks.

Everything that lives for one exchange lives here. The training thread calls ``add``, ``close``, ``abort`` and ``wait``; the
link's threads run ``_exchange`` and call ``finished``. What they share: ``_left``, ``_error`` under ``_lock``; ``_finite``,
which only ever becomes False, and which the last group reads after all others have been encoded, in the same thread;
``_states``, ``_means``, ``_flags`` and the norms, which the training thread reads only after ``_done``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.link import Job, Link, Rounds
from thinwire.comm.merge import merge
from thinwire.comm.objects import barrier
from thinwire.comm.piggyback import SmallSum
from thinwire.comm.trace import Span, Trace
from thinwire.comm.transport import Tag
from thinwire.core import ConfigError, Exchanged, State, Step
from thinwire.exchange.buffers import Places, lay_out
from thinwire.exchange.flags import Flags
from thinwire.fusion.groups import Group, Unit
from thinwire.observe.report import StepReport

if TYPE_CHECKING:
    from thinwire.exchange.channel import Channel

_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Outcome:
    """A settled transaction; the same on all ranks but for the memory of the means.

    Args:
        means: by name; what was added with ``out`` has its mean there.
        used: tensors that some rank has used. The others keep their state: nobody applies their mean.
        scalars: by name, the value of each rank.
        encoded: by unit, the bytes the mean was decoded from, where the compressor gives them.
    """

    index: int
    committed: bool
    means: Mapping[str, Tensor]
    used: frozenset[str]
    scalars: Mapping[str, list[float]]
    encoded: Mapping[Unit, Tensor]
    report: StepReport
    error: BaseException | None = None


class Transaction:
    """Made by ``Channel.begin``.

    Args:
        groups: by number in the channel, in the order in which they leave.
        scale: inputs are this many times too large (a loss scale); means are given back at the same scale.

    Attributes:
        added: inputs by name, where they lie.
        link: that carries it, also where the members have another one by now.
    """

    def __init__(self, channel: Channel, link: Link, groups: Mapping[int, Group], index: int, scale: float) -> None:
        self.index, self.added = index, dict[str, Tensor]()
        self.link = link
        self._channel, self._layout, self._scale = channel, channel.flags, scale
        self._groups = list(groups.items())
        self._group_of = {t.fqn: i for i, (_, group) in enumerate(self._groups) for t in group.tensors}
        self._missing = [len(group.tensors) for _, group in self._groups]
        self._isolated, self._norms = channel.isolated, channel.norms
        self._places = Places(channel.place_of, self._layout.numel, channel.pool)
        self._outs: dict[str, Tensor] = {}
        self._strides: dict[str, tuple[int, ...]] = {}  # of inputs that are not contiguous (channels_last)
        self._jobs: list[Job] = []
        self._ready_s: dict[str, float] = {}
        self._first_cpu_s = self._core_share = 0.0
        self._spans: list[Span] = []
        self._closed = False
        self._used: Collection[str] = ()
        self._scalars = _NOTHING
        self._lock, self._done = threading.Lock(), threading.Event()
        self._left = len(self._groups)
        self._error: BaseException | None = None
        self._finite = True
        self._flags = Flags(ok=False)
        self._states: dict[Unit, State] = {}
        self._means: dict[str, Tensor] = {}
        self._encoded: dict[Unit, Tensor] = {}
        self._local_sq: dict[str, float] = {}
        self._mean_sq: dict[str, float] = {}

    def add(self, name: str, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Give the transaction a tensor; a group that is full leaves, except the last one, which leaves at ``close``.

        Args:
            out: the mean is written there, in a thread of the link.

        Returns:
            Where the tensor lies now. Its old memory is free where the channel owns its inputs.
        """
        self._check(name)
        if self._isolated:
            self._synchronize()  # what is timed is when it was computed, not when that was asked for
        if not self._ready_s:
            self._first_cpu_s = time.thread_time()
        self._ready_s[name] = time.perf_counter()
        if not tensor.is_contiguous():
            self._strides[name] = tensor.stride()
        placed = self._places.put(name, tensor) if self._channel.owns_inputs else tensor
        self.added[name] = placed
        if out is not None:
            self._outs[name] = out
        self._missing[self._group_of[name]] -= 1
        while not self._isolated and self._may_leave():
            self._submit_next(last=False)
        return placed

    def close(self, used: Collection[str] | None = None, scalars: Mapping[str, float] = _NOTHING) -> None:
        """The rest leaves, the last group with the flags; what is missing counts as zeros.

        Args:
            used: tensors that this rank has used; default: those that were added.
            scalars: of this rank, by the channel's names.
        """
        assert not self._closed, "a transaction is closed once"
        unknown = scalars.keys() - set(self._channel.scalars)
        if unknown:
            raise ConfigError(f"scalars {sorted(unknown)} are not among those of the channel, {self._channel.scalars}")
        now_s = time.perf_counter()
        began_s = min(self._ready_s.values(), default=now_s)
        if self._ready_s:
            self._core_share = (time.thread_time() - self._first_cpu_s) / max(now_s - began_s, 1e-9)
        self._spans.append(Span("backward", began_s, now_s))
        self._closed = True
        self._used = set(self.added if used is None else used)
        self._scalars = scalars
        if self._isolated:
            # Ranks may share cores: nobody exchanges while another is timed.
            self._synchronize()
            with suppress(Exception):  # a link that has failed says so in wait(), which needs all groups to have left
                barrier(self.link)
        while len(self._jobs) < len(self._groups):
            self._submit_next(last=len(self._jobs) == len(self._groups) - 1)

    def abort(self) -> None:
        """Close with a refusal: the missing groups leave as zeros, so all ranks abort together and stay in step."""
        self._finite = False
        if not self._closed:
            self.close()

    def wait(self) -> Outcome:
        """Settle, then commit or drop; once. Raises what ended the link, unless the membership decides otherwise."""
        assert self._closed, "close() or abort() comes before wait()"
        started_s = time.perf_counter()
        self._done.wait()
        self.link.join_streams()
        self._channel.ended(self)
        flags = self._channel.members.settle(self._flags, self._scalars, self._error)
        ended_s = time.perf_counter()
        self._spans.append(Span("wait", started_s, ended_s))
        if flags.ok:
            self._channel.commit(self._states, flags.used)
        report = self._report(flags.ok, ended_s - started_s, ended_s)
        self._jobs = []  # each refers to its owner: a cycle would keep all buffers until the garbage collector runs
        return Outcome(
            index=self.index,
            committed=flags.ok,
            means=self._means,
            used=flags.used,
            scalars=flags.scalars,
            encoded=self._encoded,
            report=report,
            error=self._error,
        )

    def finished(self, job: Job, result: Any, error: BaseException | None) -> None:
        """A group has ended; called by the link."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left == 0:
                self._done.set()

    @property
    def names(self) -> Collection[str]:
        """The tensors that it covers."""
        return self._group_of.keys()

    def _check(self, name: str) -> None:
        """Mistakes are errors here, in the training thread, with its traceback; never in a thread of the link."""
        if self._closed or name in self.added or name not in self._group_of:
            wrong = "after close()" if self._closed else "twice" if name in self.added else "but is not part of it"
            raise ConfigError(f"{name} was added to transaction {self.index} of {self._channel.name!r} {wrong}")

    def _may_leave(self) -> bool:
        following = len(self._jobs)
        return following < len(self._groups) - 1 and self._missing[following] == 0

    def _submit_next(self, *, last: bool) -> None:
        number, group = self._groups[len(self._jobs)]
        tag = Tag(self.index, number, channel=self._channel.number)
        # What the training thread may still change is looked up here, not in the link's threads.
        inputs = {t.fqn: self.added[t.fqn] for t in group.tensors if t.fqn in self.added}
        buffers = [self._places.buffers.get(unit) for unit in group.units]
        job = Job(self._exchange(group, inputs, buffers, last=last), tag, self, last=last)
        self._jobs.append(job)
        self.link.submit(job)

    def _exchange(
        self, group: Group, inputs: Mapping[str, Tensor], buffers: Sequence[Tensor | None], *, last: bool
    ) -> Rounds:
        """A group on its way: everything up to the first request runs in the encode thread, the rest in reply threads."""
        padding = self._layout.numel if last else 0
        laid_out = [
            lay_out(unit, inputs, in_place=self._channel.owns_inputs, buffer=buffer, padding=padding)
            for unit, buffer in zip(group.units, buffers, strict=True)
        ]
        exchanges = [self._start(unit, x) for unit, (x, _) in zip(group.units, laid_out, strict=True)]
        if last:  # behind all others: its flag of finiteness is read when every unit has been encoded
            exchanges.append(self._agree(laid_out[-1][1]))
        results = yield from merge(exchanges)
        if last:
            self._flags = results.pop()
        for unit, result in zip(group.units, results, strict=True):
            self._take(unit, result)

    def _start(self, unit: Unit, x: Tensor) -> Generator[Any, Any, Any]:
        channel, compressor = self._channel, unit.compressor
        if self._scale != 1.0:
            x.div_(self._scale)  # residuals live in unscaled units, whatever the scaler does from step to step
        # Before anything touches the residual: one NaN there would stay for ever, and win every top-k.
        if not compressor.checks_finite and not _all_finite(x):
            self._refuse()
            x.zero_()
        if self._norms:
            self._local_sq.update(_squares(unit, x))
        channel.add_carried(unit, x)
        weights = partial(channel.side.weights, unit) if channel.side and compressor.needs_weights else None
        importance = channel.side.importance(unit) if channel.side and compressor.needs_importance else None
        where = self.index, unit.spec, self.link.rank, self.link.world_size, channel.seed
        step = Step(*where, weights, importance, on_not_finite=self._refuse)
        return compressor.exchange(x, channel.states[unit], step)

    def _refuse(self) -> None:
        self._finite = False

    def _agree(self, headroom: Tensor | None) -> Generator[SmallSum, Any, Flags]:
        """The flags of all ranks; they travel in ``headroom`` behind the last unit where that is reduced as it is."""
        channel = self._channel
        signature = f"{self.link.config}/{channel.name}/{self.index}"
        mine = self._layout.encode(ok=self._finite, used=self._used, scalars=self._scalars, signature=signature)
        sums: Tensor = yield SmallSum(mine.to(self.link.device), self.link.world_size, headroom)
        return self._layout.decode(sums.tolist(), f"step {self.index}")

    def _take(self, unit: Unit, result: Exchanged) -> None:
        self._states[unit] = result.state
        if self._norms:
            self._mean_sq.update(_squares(unit, result.mean))
        mean = result.mean if self._scale == 1.0 else result.mean * self._scale
        for tensor, part in zip(unit.spec.tensors, mean.split(unit.spec.sizes), strict=True):
            shaped = part.view(tensor.shape)
            if tensor.fqn in self._outs:
                self._outs[tensor.fqn].copy_(shaped)
            elif tensor.fqn in self._strides:  # back into the layout of the input
                strided = torch.empty_strided(
                    tensor.shape, self._strides[tensor.fqn], dtype=tensor.dtype, device=tensor.device
                )
                shaped = strided.copy_(shaped)
            self._means[tensor.fqn] = shaped if tensor.dtype is shaped.dtype else shaped.to(tensor.dtype)

    def _synchronize(self) -> None:
        if self.link.device.type == "cuda":
            torch.cuda.synchronize(self.link.device)

    def _report(self, committed: bool, wait_s: float, ended_s: float) -> StepReport:
        world, jobs = self.link.world_size, self._jobs
        numel = sum(unit.spec.numel for _, group in self._groups for unit in group.units)
        spans = sorted([*self._spans, *(span for job in jobs for span in job.spans)], key=lambda span: span.start_s)
        return StepReport(
            index=self.index,
            committed=committed,
            trace=Trace(self.index, self.link.rank, tuple(spans)),
            ready_s=self._ready_s,
            ended_s=ended_s,
            wait_s=wait_s,
            encode_s=sum(job.encode_s for job in jobs),
            wire_s=sum(job.wire_s for job in jobs),
            decode_s=sum(job.decode_s for job in jobs),
            wire_bytes=sum(job.sent_bytes for job in jobs),
            dense_bytes=2 * (world - 1) * 4 * numel // world,
            core_share=self._core_share if self.link.device.type == "cpu" else 1.0,
            local_sq=self._local_sq if committed else {},
            mean_sq=self._mean_sq if committed else {},
        )


def _all_finite(x: Tensor) -> bool:
    return kernels.all_finite(x) if x.dtype is torch.float32 else bool(x.isfinite().all())


def _squares(unit: Unit, x: Tensor) -> dict[str, float]:
    parts = zip(unit.spec.tensors, x.split(unit.spec.sizes), strict=True)
    return {tensor.fqn: float(part.dot(part)) for tensor, part in parts}
