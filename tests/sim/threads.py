"""Ranks as threads of one process, each with a transport of its own: a link's view of a network."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from thinwire.comm import Pending, Tag
from thinwire.comm.simulate import answer
from thinwire.comm.transport import Later
from thinwire.core import Reply, Request, TransportError

T = TypeVar("T")
TIMEOUT_S = 20.0


Number = tuple[int, int]  # of a message: its lane, and how many were started there before


class ThreadedWorld:
    """Matches the i-th request of every rank in a lane, as process groups do, and answers when all have asked."""

    def __init__(self, world_size: int, lanes: int = 1) -> None:
        self.world_size, self.lanes = world_size, lanes
        self._asked: dict[Number, dict[int, Request]] = defaultdict(dict)
        self._replies: dict[Number, list[Reply]] = {}
        self._changed = threading.Condition()
        self._broken = False

    def transport(self, rank: int, order: list[Tag] | None = None) -> ThreadedTransport:
        return ThreadedTransport(self, rank, order if order is not None else [])

    def put(self, number: Number, rank: int, request: Request) -> None:
        with self._changed:
            self._asked[number][rank] = request
            self._changed.notify_all()

    def get(self, number: Number, rank: int) -> Reply:
        with self._changed:
            self._changed.wait_for(lambda: self._is_complete(number) or self._broken, TIMEOUT_S)
            if self._broken and not self._is_complete(number):
                raise TransportError(f"the connection was closed before message {number} was complete")
            assert self._is_complete(number), (
                f"message {number} waits for ranks other than {sorted(self._asked[number])}"
            )
            if number not in self._replies:
                self._replies[number] = answer([self._asked[number][r] for r in range(self.world_size)])
            return self._replies[number][rank]

    def hang_up(self) -> None:
        """A rank is gone: what is not complete never will be, and who waits for it is told, as with TCP."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _is_complete(self, number: Number) -> bool:
        return len(self._asked[number]) == self.world_size


class ThreadedTransport:
    """One rank's end."""

    def __init__(self, world: ThreadedWorld, rank: int, order: list[Tag]) -> None:
        self.world, self.rank, self.world_size, self.lanes = world, rank, world.world_size, world.lanes
        self._order, self._started = order, [0] * world.lanes

    def start(self, request: Request, tag: Tag) -> Pending:
        lane = min(tag.round, self.lanes - 1)
        number = lane, self._started[lane]
        self._started[lane] += 1
        self._order.append(tag)
        self.world.put(number, self.rank, request)
        return Later(lambda: self.world.get(number, self.rank), request.sent_bytes(self.world_size))


def link_threads() -> list[threading.Thread]:
    """The threads of all links that have not ended; ``host | ...`` has a worker that belongs to no link."""
    gc.collect()  # a wire that another test has dropped ends its threads then
    names = {thread: thread.name for thread in threading.enumerate()}
    return [one for one, name in names.items() if name.startswith("thinwire") and not name.startswith("thinwire-host")]


def run_ranks(work: Callable[[int], T], world_size: int) -> list[T]:
    """Run ``work(rank)`` in one thread per rank; the first error of any rank is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S + 10)
    if errors:
        raise errors[0]
    assert len(results) == world_size, f"only ranks {sorted(results)} have ended"
    return [results[rank] for rank in range(world_size)]
