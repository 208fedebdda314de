"""The step simulator: thinwire's link on paper (``comm.link``).

In lanes, each round has a thread: the first one encodes groups in ready order and starts them, the next one waits for their
replies in that order and starts their second round, and so on. As a wavefront, one thread works off the groups in ready
order: encode, start the first round, then give every older group its replies and start its next round, oldest first, but not
where the last round is under way. Either way one wire carries the messages in the order in which they were started, the first
ones after a rest faster where a shaper lets bursts pass. Work of these threads, and of the network stack, takes processor
time; where ranks share cores it delays backward (``plan.cluster``), so gradients are ready later than they were without
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.comm.piggyback import Kind
from thinwire.comm.trace import Span
from thinwire.plan.cluster import Cluster


@dataclass(frozen=True)
class Message:
    """One collective.

    Args:
        startup_s: what it would take without any bytes.
        kind: the collective; the simulator does not look at it.
    """

    wire_s: float
    cpu_s: float = 0.0
    sent_bytes: float = 0.0
    startup_s: float = 0.0
    kind: Kind | None = None


@dataclass(frozen=True)
class GroupWork:
    """A fusion group before it is scheduled.

    Args:
        ready_s: when its last gradient is there, after the start of backward.
        stages_s: processor seconds before the first round, between rounds, and after the last: one more than rounds.
        rounds: the messages of each round.
    """

    ready_s: float
    stages_s: tuple[float, ...]
    rounds: tuple[tuple[Message, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.stages_s) == len(self.rounds) + 1


@dataclass(frozen=True)
class Simulated:
    """A simulated exchange; times count from the start of backward."""

    spans: tuple[Span, ...]
    backward_s: float
    finish_s: float

    @property
    def wait_s(self) -> float:
        """How long training waits after backward."""
        return self.finish_s - self.backward_s


@dataclass
class _Live:
    index: int
    work: GroupWork
    started: int = 0  # rounds
    arrives_s: float = 0.0

    @property
    def has_more_to_start(self) -> bool:
        return self.started < len(self.work.rounds)


@dataclass
class _Clock:
    """The state of the simulation."""

    backward_s: float
    slowdown: float
    busy_slowdown: float
    largest_burst_s: float
    burst_s: float  # what the wire has saved up by resting
    thread_s: float = 0.0
    wire_free_s: float = 0.0
    delay_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @property
    def overlaps(self) -> bool:
        """Whether backward is still running."""
        return self.thread_s < self.backward_s + self.delay_s

    def compute(self, seconds: float, live: _Live) -> None:
        """Processor time of the communication thread."""
        began_s = self.thread_s
        if self.overlaps:
            self.thread_s += self.busy_slowdown * seconds
            self.delay_s += (self.busy_slowdown - self.slowdown) * seconds
        else:
            self.thread_s += self.slowdown * seconds
        activity = "decode" if live.started else "encode"
        self.spans.append(Span(activity, began_s, self.thread_s, live.index))  # type: ignore[arg-type]

    def send(self, messages: Sequence[Message], live: _Live) -> None:
        """Start a round behind whatever is on the wire."""
        for message in messages:
            stolen_s = (self.busy_slowdown - self.slowdown) * message.cpu_s if self.overlaps else 0.0
            self.delay_s += stolen_s
            began_s = max(self.thread_s, self.wire_free_s)
            self.wire_free_s = began_s + self._on_wire_s(message, began_s - self.wire_free_s) + stolen_s
            self.spans.append(Span("wire", began_s, self.wire_free_s, live.index, int(message.sent_bytes)))
        live.arrives_s = self.wire_free_s
        live.started += 1

    def _on_wire_s(self, message: Message, rested_s: float) -> float:
        self.burst_s = min(self.burst_s + rested_s, self.largest_burst_s)
        saved_s = min(self.burst_s, message.wire_s)
        self.burst_s -= saved_s
        return message.wire_s - saved_s


def simulate_groups(
    groups: Sequence[GroupWork],
    backward_s: float,
    cluster: Cluster,
    *,
    burst_s: float = 0.0,
    rested_s: float = 0.0,
    in_lanes: bool = False,
) -> Simulated:
    """Play one exchange.

    Args:
        groups: in ready order.
        backward_s: as measured without communication, with ``cluster.slowdown`` in it.
        burst_s: what the wire saves up at most (``Network.burst_s``).
        rested_s: how long it has had nothing to do when backward begins.
        in_lanes: rounds have threads of their own.
    """
    clock = _Clock(backward_s, cluster.slowdown, cluster.busy_slowdown, burst_s, min(burst_s, rested_s))
    (_in_lanes if in_lanes else _as_wavefront)(groups, clock)
    end_s = clock.backward_s + clock.delay_s
    spans = (Span("backward", 0.0, end_s), *clock.spans)
    finish_s = max(end_s, *(span.end_s for span in spans))
    if finish_s > end_s:
        spans = (*spans, Span("wait", end_s, finish_s))
    return Simulated(spans, end_s, finish_s)


def _in_lanes(groups: Sequence[GroupWork], clock: _Clock) -> None:
    """Whichever thread can go on first does; thread s works on what comes after round s of each group, in their order."""
    live = [_Live(index, work, arrives_s=work.ready_s) for index, work in enumerate(groups)]
    queues = [[one for one in live if len(one.work.rounds) >= stage] for stage in range(_most_rounds(groups) + 1)]
    threads_s = [0.0] * len(queues)
    while any(queues):
        able = [stage for stage, queue in enumerate(queues) if queue and queue[0].started == stage]
        # Gradients are ready later where communication has delayed backward; replies arrive when they do.
        starts_s = {
            stage: max(threads_s[stage], queues[stage][0].arrives_s + (0.0 if stage else clock.delay_s))
            for stage in able
        }
        stage = min(able, key=lambda one: (starts_s[one], -one))
        group = queues[stage].pop(0)
        clock.thread_s = starts_s[stage]
        clock.compute(group.work.stages_s[stage], group)
        if stage < len(group.work.rounds):
            clock.send(group.work.rounds[stage], group)
        threads_s[stage] = clock.thread_s


def _most_rounds(groups: Sequence[GroupWork]) -> int:
    return max((len(work.rounds) for work in groups), default=0)


def _as_wavefront(groups: Sequence[GroupWork], clock: _Clock) -> None:
    live: list[_Live] = []
    for index, work in enumerate(groups):
        clock.thread_s = max(clock.thread_s, work.ready_s + clock.delay_s)
        group = _Live(index, work)
        older = _with_more_to_start(live)
        clock.compute(work.stages_s[0], group)
        if work.rounds:
            clock.send(work.rounds[0], group)
            live.append(group)
        _resume(older, live, clock)
    while live:
        _resume(_with_more_to_start(live) or list(live), live, clock)


def _with_more_to_start(live: Sequence[_Live]) -> list[_Live]:
    return [group for group in live if group.has_more_to_start]


def _resume(chosen: Sequence[_Live], live: list[_Live], clock: _Clock) -> None:
    for group in chosen:
        clock.thread_s = max(clock.thread_s, group.arrives_s)
        clock.compute(group.work.stages_s[group.started], group)
        if group.has_more_to_start:
            clock.send(group.work.rounds[group.started], group)
        else:
            live.remove(group)
