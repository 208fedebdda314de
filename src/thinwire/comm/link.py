"""A link: one ordered stream of messages among the same ranks, with the threads that drive it and the first error.

Ranks finish things at different times, so nothing that happens on the network may depend on what finished first: the order
of messages is a function of the order of submission alone. (PyTorch's PowerSGD hook starts its second collective from a
completion callback; with several buckets on gloo the ranks interleave differently and the job dies of a size mismatch.)

Where a transport has several *lanes*, order matters only within a lane. The first rounds of all groups travel in one lane,
their second rounds in another, and each lane has a thread that takes its replies: the encode thread starts groups in the
order of submission, the first reply thread waits for their replies in that order and starts their second round, and so on.
No round waits for another group's, yet every lane has the same order on all ranks.

With one lane, or groups whose rounds are not known beforehand, the encode thread does it all and the order is a *wavefront*.
When group i is submitted, its first round is started; then every older group, the oldest first, gets its replies and starts
its next round. So group i+1 is encoded and on the wire while group i is being decoded, and methods of several rounds overlap.
A group in what was its last round the time before is passed over: it has nothing more to start, and waiting for its replies
would only delay the next group. The last job of an owner makes the thread run all jobs of that owner to their end.

One mode holds for a whole link: as a wavefront the encode thread starts second rounds, in lanes a reply thread does. Mixed,
the order in the second lane would depend on timing.

What threads share: a ``Job`` belongs to one thread at a time and is handed on through a queue. ``_errors`` is only appended
to: two threads may fail at about the same time, and all hear of the first entry. ``_took`` and ``_live`` belong to the encode
thread. Queues need no lock of ours.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from thinwire.comm.framing import Framed
from thinwire.comm.trace import Activity, Span
from thinwire.comm.transport import Pending, Tag, Transport, fit_lanes
from thinwire.core import AllGather, ConfigError, Request, ThinwireError, memory
from thinwire.core.request import Partition

log = logging.getLogger(__name__)
Rounds = Generator[tuple[Request, ...], Any, Any]
_CPU = torch.device("cpu")
_CLOSE_S = 5.0


class Owner(Protocol):
    """Who submits jobs and is told when each has ended."""

    def finished(self, job: Job, result: Any, error: BaseException | None) -> None:
        """Called once per job, in a thread of the link."""


@dataclass(eq=False)
class Job:
    """A group on its way: a generator that yields requests.

    Code before its first yield runs in the encode thread, the rest in reply threads, never two at once.

    Args:
        last: the owner submits nothing after it.

    Attributes:
        encode_s, wire_s, decode_s: the link's threads encoded, waited for the network, decoded.
    """

    exchange: Rounds
    tag: Tag
    owner: Owner
    last: bool = False
    in_lanes: bool = False
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)
    pending: list[Pending] = field(default_factory=list)
    rounds: int = 0
    ended: bool = False
    spans: list[Span] = field(default_factory=list)
    sent_s: float = 0.0
    sent_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0


class Link:
    """Runs jobs on ``transport`` from threads of its own. All methods belong to the training thread.

    Args:
        device: where the tensors live. On CUDA the threads work on a side stream that waits for the submitting one.
        name: of its threads, ``thinwire-<name>-encode`` and ``thinwire-<name>-reply<lane>``.
        config: a 64-bit hash of model and settings that every header carries.

    Attributes:
        rounds_in_lanes: the mode; see ``declare``.
        open: transactions under way.
        sent_bytes: what barriers, objects and measurements have sent; transactions count their own.
    """

    def __init__(
        self, transport: Transport, device: torch.device = _CPU, *, name: str = "grad", config: int = 0
    ) -> None:
        self.transport: Transport = Framed(transport, config)
        self.config = config
        self.rank, self.world_size, self.device = transport.rank, transport.world_size, device
        self.rounds_in_lanes = False
        self.open = 0
        self.sent_bytes = 0
        self.pool = memory.Pool()
        self._bare = transport
        self._rounds: dict[int, list[int | None]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._submitted: _Queue = queue.SimpleQueue()
        self._awaited: list[_Queue] = [queue.SimpleQueue() for _ in range(transport.lanes)]
        self._live: list[Job] = []  # of the wavefront
        self._took: dict[tuple[int, int], int] = {}  # rounds by channel and group, the last time; the same on all ranks
        self._errors: list[BaseException] = []
        self._prepared: set[Partition] = set()
        self._closed = False
        # With one lane the encode thread takes the replies too.
        replies = [(f"reply{lane}", partial(self._take_replies, lane)) for lane in range(transport.lanes)]
        works = [("encode", self._encode), *(replies if len(replies) > 1 else [])]
        self._threads = [
            # Daemons: a rank that dies inside a collective must not keep the process from ending.
            threading.Thread(target=self._run, args=(work,), name=f"thinwire-{name}-{role}", daemon=True)
            for role, work in works
        ]
        for thread in self._threads:
            thread.start()

    def declare(self, channel: int, rounds: Iterable[int | None]) -> None:
        """The rounds that a channel's units take from now on; they decide the mode.

        Raises:
            ConfigError: the mode would change while transactions are open. Nothing has changed then.
        """
        declared = {**self._rounds, channel: list(rounds)}
        in_lanes = fit_lanes((one for of in declared.values() for one in of), self.transport.lanes)
        if self.open and in_lanes is not self.rounds_in_lanes:
            raise ConfigError(
                "other rounds change how messages of this link are ordered, which it can only while it is idle; wait for "
                "the open transactions of its channels first"
            )
        self._rounds, self.rounds_in_lanes = declared, in_lanes

    def prepare(self, partitions: Iterable[Partition]) -> None:
        """Let the transport make the process groups of partitions, while the training thread waits.

        Made at first use, in the threads of two links, their order could differ between ranks, and ranks would hang.
        """
        for partition in partitions:
            if partition not in self._prepared:
                self._prepared.add(partition)
                self.run(ask(AllGather(torch.zeros(1, dtype=torch.uint8, device=self.device), partition=partition)))

    def submit(self, job: Job) -> None:
        """Queue a job. The order of submission is the order on the wire."""
        assert not self._closed, "this link is closed"
        job.in_lanes, job.context = self.rounds_in_lanes, self._side_stream()
        self._submitted.put(job)

    def run(self, exchange: Rounds) -> Any:
        """One exchange, waited for: set-up, barriers, objects. Raises what went wrong with it."""
        call = _Call()
        job = Job(exchange, Tag(), call, last=True)
        self.submit(job)
        call.done.wait()
        self.join_streams()
        self.sent_bytes += job.sent_bytes
        if call.error is not None:
            raise call.error
        return call.result

    @contextmanager
    def idle(self) -> Iterator[Transport]:
        """The bare transport, for measurements: no headers, no threads. Raises while anything is under way."""
        assert not self.open, "measurements would mix with the messages of an open transaction"
        counted = _Counted(self._bare)
        try:
            yield counted
        finally:
            self.sent_bytes += counted.sent_bytes

    def join_streams(self) -> None:
        """Make the caller's CUDA stream wait for the side stream; nothing to do on CPU."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the threads, then the transport; what is under way gets ``timeout_s``. Safe to call twice, in any thread."""
        self._closed = True
        self._submitted.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in one of them
                thread.join(max(0.0, deadline_s - time.monotonic()))
        # A process group must not be destroyed under a thread that still waits inside one of its collectives.
        if not any(thread.is_alive() for thread in self._threads) and hasattr(self._bare, "close"):
            self._bare.close()

    def _side_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _run(self, work: Callable[[], None]) -> None:
        # Grad mode is a property of the thread: without this every decode would build a graph over parameters' views.
        with memory.recycling(self.pool), torch.no_grad():
            work()

    def _encode(self) -> None:
        """The encode thread: jobs as they come."""
        while (job := self._submitted.get()) is not None:
            if job.in_lanes:
                self._drive(job)
                self._awaited[0].put(job)
            else:
                self._drive_wavefront(job)
            del job  # while the thread waits for the next one, nothing may keep this one's buffers from the pool
        self._awaited[0].put(None)

    def _drive_wavefront(self, job: Job) -> None:
        """The new job starts, then the older ones go on; the last one of an owner ends them all."""
        older = self._with_more_to_start(self._live)
        self._live.append(job)
        for one in (job, *older):
            self._drive(one)
        while job.last and (own := [one for one in self._live if one.owner is job.owner]):
            for one in self._with_more_to_start(own) or own:
                self._drive(one)

    def _take_replies(self, lane: int) -> None:
        """A reply thread: takes the replies to what was started in its lane, in that order."""
        onward = self._awaited[lane + 1] if lane + 1 < len(self._awaited) else None
        while (job := self._awaited[lane].get()) is not None:
            if not job.ended:
                self._drive(job)
            if onward is not None:
                onward.put(job)
            del job
        if onward is not None:
            onward.put(None)

    def _with_more_to_start(self, jobs: list[Job]) -> list[Job]:
        return [job for job in jobs if job.rounds != self._took.get((job.tag.channel, job.tag.group))]

    def _drive(self, job: Job) -> None:
        """One round of a job. After a failure no round is begun: other ranks must not get messages out of order."""
        result = None
        try:
            if not self._errors:
                with job.context:
                    result = self._advance(job)
        except ThinwireError as error:
            self._errors.append(error)
        except Exception as error:  # the thread must survive to hand the error to the owner
            log.exception("communication failed in %s", job.tag)
            self._errors.append(error)
        if self._errors:
            # Closed before its transaction is dropped: a generator holds the buffers of a collective that still runs.
            job.exchange.close()
            job.ended = True
        if job.ended:
            if job in self._live:
                self._live.remove(job)
            job.owner.finished(job, result, self._errors[0] if self._errors else None)

    def _advance(self, job: Job) -> Any:
        """Give a job the replies it waits for, and start its next round; its result where there is none."""
        began_s, replies = time.perf_counter(), None
        arrived_s = began_s
        if job.rounds:
            with _label("wire"):
                replies = tuple(pending.wait() for pending in job.pending)
            arrived_s = time.perf_counter()
            sent_bytes = sum(pending.sent_bytes for pending in job.pending)
            job.sent_bytes += sent_bytes
            job.wire_s += arrived_s - began_s
            job.spans.append(Span("wire", job.sent_s, arrived_s, job.tag.group, sent_bytes))
            job.pending = []
        activity: Activity = "decode" if job.rounds else "encode"
        result = None
        with _label(activity):
            try:
                requests = job.exchange.send(replies)
            except StopIteration as stop:
                result, job.ended = stop.value, True
                self._took[job.tag.channel, job.tag.group] = job.rounds
            else:
                assert not job.in_lanes or job.rounds < self.transport.lanes, (
                    f"{job.tag}: more rounds than were declared"
                )
                job.sent_s = time.perf_counter()
                tag = job.tag._replace(round=job.rounds)
                # Kept until the reply: the pool gives memory away as soon as nothing refers to it.
                job.pending = [self.transport.start(request, tag) for request in requests]
                job.rounds += 1
        ended_s = time.perf_counter()
        if activity == "encode":
            job.encode_s += ended_s - arrived_s
        else:
            job.decode_s += ended_s - arrived_s
        job.spans.append(Span(activity, arrived_s, ended_s, job.tag.group))
        return result


class _Call:
    """The owner of one exchange that the training thread waits for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def finished(self, job: Job, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.done.set()


class _Counted:
    """A transport that keeps what it has started, to count the bytes."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.world_size, self.lanes = inner, inner.rank, inner.world_size, inner.lanes
        self.sent_bytes = 0

    def start(self, request: Request, tag: Tag) -> Pending:
        pending = self.inner.start(request, tag)
        self.sent_bytes += request.sent_bytes(self.world_size)
        return pending


_Queue = queue.SimpleQueue[Job | None]


def ask(request: Request) -> Rounds:
    """One request as an exchange of its own; returns the reply."""
    (reply,) = yield (request,)
    return reply


def _label(activity: Activity) -> AbstractContextManager[Any]:
    """A label for the PyTorch profiler; nothing where none is running, because labels take tens of microseconds."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"thinwire::{activity}")
