"""One communication thread that owns the order of all messages.

Ranks finish things at different times, so nothing that happens on the network may depend on what finished first: the order
of messages is a function of the order of submission alone. (PyTorch's PowerSGD hook starts its second collective from a
completion callback; with several buckets on gloo the ranks interleave differently and the job dies of a size mismatch.)

The order is a wavefront. When group i is submitted, its first round is started; then every older group still under way, the
oldest first, gets its replies and starts its next round. So group i+1 is encoded and on the wire while group i is being
decoded, and methods of several rounds overlap with each other. ``advance`` does the second half of that between two
submissions. A group in what was its last round in the step before is passed over: it has nothing more to start, and waiting
for its replies would only keep the next group back. ``flush`` ends a step: it runs all groups to their end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from thinwire.comm.trace import Activity, Span
from thinwire.comm.transport import Pending, Tag, Transport
from thinwire.core import Request, ThinwireError, TransportError, memory

log = logging.getLogger(__name__)
# Group numbers from here on belong to no fusion group: agreements, set-up.
FIRST_RESERVED_GROUP = 0xFFFF_0000
Rounds = Generator[tuple[Request, ...], Any, Any]


@dataclass
class Seconds:
    """Where the communication thread's time goes."""

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


class Ticket:
    """A submitted group."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callback: Callable[[BaseException | None], None] | None = None
        self._lock = threading.Lock()

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = error
            self._done.set()
            callback = self._callback
        if callback is not None:
            callback(error)

    def then(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call ``callback`` with the error, or None, once the group is done; at once if it already is."""
        with self._lock:
            self._callback = callback
            late = self._done.is_set()
        if late:
            callback(self._error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the group is done; raises what went wrong with it."""
        if not self._done.wait(timeout_s):
            raise TransportError(f"no answer from the communication thread within {timeout_s} s; is a rank missing?")
        if self._error is not None:
            raise self._error


@dataclass
class _Job:
    """One group on its way through the rounds."""

    prepare: Callable[[], Rounds]
    done: Callable[[Any], None]
    tag: Tag
    ticket: Ticket
    context: AbstractContextManager[Any]
    exchange: Rounds | None = None
    pending: list[Pending] = field(default_factory=list)
    rounds: int = 0
    sent_s: float = 0.0
    sent_bytes: int = 0

    @property
    def traced_group(self) -> int:
        return self.tag.group if self.tag.group < FIRST_RESERVED_GROUP else -1


class _Advance:
    pass


@dataclass
class _Flush:
    done: Callable[[], None]
    ticket: Ticket


class Scheduler:
    """Runs submitted groups on ``transport`` from a thread of its own.

    Args:
        device: where the gradients live. On CUDA the thread works on a side stream that waits for the submitting one.
    """

    def __init__(self, transport: Transport, device: torch.device | None = None) -> None:
        self.transport = transport
        self.seconds = Seconds()
        self.pool = memory.Pool()
        self.spans: list[Span] = []
        self.rounds = 0  # the most that a fusion group took in the last step; the same on all ranks
        on_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._queue: queue.SimpleQueue[_Job | _Advance | _Flush | None] = queue.SimpleQueue()
        self._live: list[_Job] = []
        self._rounds = 0
        self._took: dict[int, int] = {}  # rounds of each group when it was last exchanged; the same on all ranks
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-comm", daemon=True)
        self._thread.start()

    def submit(self, prepare: Callable[[], Rounds], done: Callable[[Any], None], *, step: int, group: int) -> Ticket:
        """Queue a group. ``prepare`` makes its exchange and ``done`` takes its results, both in the thread."""
        ticket = Ticket()
        self._queue.put(_Job(prepare, done, Tag(step, group), ticket, self._side_stream()))
        return ticket

    def advance(self) -> None:
        """Let every group under way get its replies and start its next round, the oldest first.

        All ranks do so at the same points of their submissions.
        """
        self._queue.put(_Advance())

    def flush(self, done: Callable[[], None] | None = None) -> Ticket:
        """End a step: all groups submitted so far run to their end, then ``done`` is called, in the thread.

        All ranks flush at the same points.
        """
        flush = _Flush(done or (lambda: None), Ticket())
        self._queue.put(flush)
        return flush.ticket

    def take_spans(self) -> list[Span]:
        """The spans since the last call, for a trace of a step."""
        spans, self.spans = self.spans, []
        return spans

    def close(self) -> None:
        """Stop the thread. Groups under way are run to their end first."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def join_streams(self) -> None:
        """Make the caller's CUDA stream wait for the side stream; nothing to do on CPU."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _side_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _run(self) -> None:
        with memory.recycling(self.pool):
            self._work_off()

    def _work_off(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Flush):
                self._end(item)
                continue
            older = self._with_more_to_start()
            if isinstance(item, _Job):
                self._guarded(self._begin, item)
            for job in older:
                self._guarded(self._resume, job)
        self._drain()

    def _with_more_to_start(self) -> list[_Job]:
        return [job for job in self._live if job.rounds != self._took.get(job.tag.group)]

    def _end(self, flush: _Flush) -> None:
        self._drain()
        try:
            if self._error is None:
                flush.done()
        except Exception as error:  # as in _guarded: whoever waits must hear of it
            log.exception("the end of a step failed")
            self._error = error
        self.pool.end_step()
        if self._rounds:
            self.rounds, self._rounds = self._rounds, 0
        flush.ticket.finish(self._error)

    def _drain(self) -> None:
        while self._live:
            for job in self._with_more_to_start() or list(self._live):
                self._guarded(self._resume, job)

    def _guarded(self, advance: Callable[[_Job], None], job: _Job) -> None:
        """After a failure nothing more is sent: other ranks must not get messages out of turn."""
        try:
            if self._error is None:
                with job.context:
                    advance(job)
                return
        except ThinwireError as error:
            self._error = error
        except Exception as error:  # the thread must survive to hand the error to whoever waits
            log.exception("communication failed in %s", job.tag)
            self._error = error
        self._leave(job, self._error)

    def _begin(self, job: _Job) -> None:
        self._live.append(job)
        started_s = time.perf_counter()
        with _label("encode"):
            job.exchange = job.prepare()
            self._advance(job, None)
        self._account("encode", started_s, time.perf_counter(), job)

    def _resume(self, job: _Job) -> None:
        started_s, sent_s, sent_bytes = time.perf_counter(), job.sent_s, job.sent_bytes
        with _label("wire"):
            replies = tuple(pending.wait() for pending in job.pending)
        arrived_s = time.perf_counter()
        with _label("decode"):
            self._advance(job, replies)
        self.seconds.wire_s += arrived_s - started_s
        self.spans.append(Span("wire", sent_s, arrived_s, job.traced_group, sent_bytes))
        self._account("decode", arrived_s, time.perf_counter(), job)

    def _account(self, activity: Literal["encode", "decode"], start_s: float, end_s: float, job: _Job) -> None:
        if activity == "encode":
            self.seconds.encode_s += end_s - start_s
        else:
            self.seconds.decode_s += end_s - start_s
        self.spans.append(Span(activity, start_s, end_s, job.traced_group))

    def _advance(self, job: _Job, replies: tuple[Any, ...] | None) -> None:
        assert job.exchange is not None
        try:
            requests = job.exchange.send(replies)
        except StopIteration as stop:
            self._took[job.tag.group] = job.rounds
            job.done(stop.value)
            self._leave(job, None)
            return
        tag = job.tag._replace(round=job.rounds)
        job.sent_s = time.perf_counter()
        job.sent_bytes = sum(request.sent_bytes(self.transport.world_size) for request in requests)
        job.pending = [self.transport.start(request, tag) for request in requests]
        job.rounds += 1
        if job.tag.group < FIRST_RESERVED_GROUP:
            self._rounds = max(self._rounds, job.rounds)

    def _leave(self, job: _Job, error: BaseException | None) -> None:
        if job in self._live:
            self._live.remove(job)
        job.ticket.finish(error)


def _label(activity: Activity) -> AbstractContextManager[Any]:
    """A label for the PyTorch profiler; nothing where none is running, because labels take tens of microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"thinwire::{activity}")
