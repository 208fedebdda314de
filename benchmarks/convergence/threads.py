"""Workers as threads of one process, each with a real wire: what policies do is what they do on a cluster."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from thinwire.comm import Pending, Tag
from thinwire.comm.simulate import answer
from thinwire.comm.transport import Later
from thinwire.core import Reply, Request, TransportError


class World:
    """Matches the i-th request of every worker and answers when all have asked."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.failed = world_size, False
        self._asked: dict[int, dict[int, Request]] = defaultdict(dict)
        self._replies: dict[int, dict[int, Reply]] = {}
        self._changed = threading.Condition()

    def ask(self, number: int, rank: int, request: Request) -> None:
        """One worker's request; the last one is answered for all."""
        with self._changed:
            asked = self._asked[number]
            asked[rank] = request
            if len(asked) == self.world_size:
                self._replies[number] = dict(enumerate(answer([asked[one] for one in range(self.world_size)])))
                del self._asked[number]
                self._changed.notify_all()

    def reply(self, number: int, rank: int) -> Reply:
        """Wait for the others; what all have taken is forgotten."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self.failed)
            if number not in self._replies:
                raise TransportError("another worker has failed")
            mine = self._replies[number].pop(rank)
            if not self._replies[number]:
                del self._replies[number]
            return mine

    def fail(self) -> None:
        """Who waits is told."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()


class Transport:
    """One worker's end."""

    lanes = 1

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size, self._started = world, rank, world.world_size, 0

    def start(self, request: Request, tag: Tag) -> Pending:
        number = self._started
        self._started += 1
        self.world.ask(number, self.rank, request)
        return Later(lambda: self.world.reply(number, self.rank), request.sent_bytes(self.world_size))


def run_workers(work: Callable[[int, Transport], Any], world_size: int) -> list[Any]:
    """``work(rank, transport)`` in one thread per worker; the first error of any is raised."""
    world, results, errors = World(world_size), dict[int, Any](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Transport(world, rank))
        except BaseException as error:
            errors.append(error)
            world.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
