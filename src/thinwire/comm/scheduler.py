"""The order of all messages: a communication thread that owns it, or one for each round.

Ranks finish things at different times, so nothing that happens on the network may depend on what finished first: the order
of messages is a function of the order of submission alone. (PyTorch's PowerSGD hook starts its second collective from a
completion callback; with several buckets on gloo the ranks interleave differently and the job dies of a size mismatch.)

Where a transport has several *lanes*, order matters only within a lane, and the first rounds of all groups travel in one
lane, their second rounds in another. So each round has a thread of its own: the first one encodes groups in the order of
submission and starts them, the next one waits for their replies in the same order and starts their second round, and so on.
No round waits for another group's, yet every lane has the same order on all ranks.

With one lane, or groups whose rounds are not known beforehand, one thread does it all and the order is a wavefront. When
group i is submitted, its first round is started; then every older group still under way, the oldest first, gets its replies
and starts its next round. So group i+1 is encoded and on the wire while group i is being decoded, and methods of several
rounds overlap with each other. A group in what was its last round in the step before is passed over: it has nothing more to
start, and waiting for its replies would only keep the next group back. ``flush`` ends a step: it runs all groups to their
end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from thinwire.comm.job import Flush, Job, Rounds, Ticket
from thinwire.comm.trace import Activity, Span
from thinwire.comm.transport import Tag, Transport
from thinwire.core import ThinwireError, memory

log = logging.getLogger(__name__)
_Items = queue.SimpleQueue[Job | Flush | None]


@dataclass
class Seconds:
    """Where the time of the communication threads goes."""

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


class Scheduler:
    """Runs submitted groups on ``transport`` from threads of its own.

    Args:
        device: where the gradients live. On CUDA the thread works on a side stream that waits for the submitting one.

    Attributes:
        in_lanes: what is submitted from now on takes at most as many rounds as there are lanes, of which all ranks know
            the sizes beforehand. To be changed between steps only, on all ranks alike.
    """

    def __init__(self, transport: Transport, device: torch.device | None = None) -> None:
        self.transport = transport
        self.seconds = Seconds()
        self.pool = memory.Pool()
        self.spans: list[Span] = []
        self.in_lanes = False
        on_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._queue: _Items = queue.SimpleQueue()
        self._live: list[Job] = []  # of the wavefront
        self._took: dict[int, int] = {}  # rounds of each group when it was last exchanged; the same on all ranks
        self._error: BaseException | None = None
        self._books = threading.Lock()
        self._awaited: list[_Items] = [queue.SimpleQueue() for _ in range(transport.lanes)]
        # With one lane the first thread takes the replies too.
        with_threads = range(transport.lanes if transport.lanes > 1 else 0)
        works = [self._work_off, *(partial(self._await_replies, lane) for lane in with_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="thinwire-comm", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, prepare: Callable[[], Rounds], done: Callable[[Any], None], *, step: int, group: int) -> Ticket:
        """Queue a group. ``prepare`` makes its exchange and ``done`` takes its results, both in the thread."""
        ticket = Ticket()
        self._queue.put(Job(prepare, done, Tag(step, group), self.in_lanes, ticket, self._side_stream()))
        return ticket

    def flush(self, done: Callable[[], None] | None = None) -> Ticket:
        """End a step: all groups submitted so far run to their end, then ``done`` is called, in the thread.

        All ranks flush at the same points.
        """
        flush = Flush(done or (lambda: None), self.in_lanes, Ticket())
        self._queue.put(flush)
        return flush.ticket

    def take_spans(self) -> list[Span]:
        """The spans since the last call, for a trace of a step."""
        spans, self.spans = self.spans, []
        return spans

    def close(self) -> None:
        """Stop the threads. Groups under way are run to their end first."""
        if self._threads[0].is_alive():
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def join_streams(self) -> None:
        """Make the caller's CUDA stream wait for the side stream; nothing to do on CPU."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _side_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _run(self, work: Callable[[], None]) -> None:
        with memory.recycling(self.pool):
            work()

    def _work_off(self) -> None:
        """The first thread: whatever is submitted, as it comes."""
        while (item := self._queue.get()) is not None:
            if item.in_lanes:
                if isinstance(item, Job):
                    self._guarded(self._begin, item)
                self._awaited[0].put(item)
            elif isinstance(item, Flush):
                self._drain()
                self._end(item)
            else:
                older = self._with_more_to_start()
                self._live.append(item)
                self._guarded(self._begin, item)
                for job in older:
                    self._guarded(self._resume, job)
        self._drain()
        self._awaited[0].put(None)

    def _await_replies(self, lane: int) -> None:
        """The thread of a lane: takes the replies to what was started there, in that order."""
        onward = self._awaited[lane + 1] if lane + 1 < len(self._awaited) else None
        while (item := self._awaited[lane].get()) is not None:
            if isinstance(item, Job) and not item.ticket.done:
                self._guarded(self._resume, item)
            if onward is not None:
                onward.put(item)
            elif isinstance(item, Flush):
                self._end(item)
        if onward is not None:
            onward.put(None)

    def _with_more_to_start(self) -> list[Job]:
        return [job for job in self._live if job.rounds != self._took.get(job.tag.group)]

    def _end(self, flush: Flush) -> None:
        try:
            if self._error is None:
                flush.done()
        except Exception as error:  # as in _guarded: whoever waits must hear of it
            log.exception("the end of a step failed")
            self._error = error
        self.pool.end_step()
        flush.ticket.finish(self._error)

    def _drain(self) -> None:
        while self._live:
            for job in self._with_more_to_start() or list(self._live):
                self._guarded(self._resume, job)

    def _guarded(self, advance: Callable[[Job], None], job: Job) -> None:
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

    def _begin(self, job: Job) -> None:
        started_s = time.perf_counter()
        with _label("encode"):
            job.exchange = job.prepare()
            self._advance(job, None)
        self._account("encode", started_s, time.perf_counter(), job)

    def _resume(self, job: Job) -> None:
        started_s, sent_s, sent_bytes = time.perf_counter(), job.sent_s, job.sent_bytes
        with _label("wire"):
            replies = tuple(pending.wait() for pending in job.pending)
        arrived_s = time.perf_counter()
        with _label("decode"):
            self._advance(job, replies)
        with self._books:
            self.seconds.wire_s += arrived_s - started_s
        self.spans.append(Span("wire", sent_s, arrived_s, job.traced_group, sent_bytes))
        self._account("decode", arrived_s, time.perf_counter(), job)

    def _account(self, activity: Literal["encode", "decode"], start_s: float, end_s: float, job: Job) -> None:
        with self._books:
            if activity == "encode":
                self.seconds.encode_s += end_s - start_s
            else:
                self.seconds.decode_s += end_s - start_s
        self.spans.append(Span(activity, start_s, end_s, job.traced_group))

    def _advance(self, job: Job, replies: tuple[Any, ...] | None) -> None:
        assert job.exchange is not None
        try:
            requests = job.exchange.send(replies)
        except StopIteration as stop:
            self._took[job.tag.group] = job.rounds
            job.done(stop.value)
            self._leave(job, None)
            return
        assert not job.in_lanes or job.rounds < self.transport.lanes, f"{job.tag}: more rounds than were declared"
        tag = job.tag._replace(round=job.rounds)
        job.sent_s = time.perf_counter()
        job.sent_bytes = sum(request.sent_bytes(self.transport.world_size) for request in requests)
        job.pending = [self.transport.start(request, tag) for request in requests]
        job.rounds += 1

    def _leave(self, job: Job, error: BaseException | None) -> None:
        if job in self._live:
            self._live.remove(job)
        job.ticket.finish(error)


def _label(activity: Activity) -> AbstractContextManager[Any]:
    """A label for the PyTorch profiler; nothing where none is running, because labels take tens of microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"thinwire::{activity}")
