"""A long all-to-all, one partner after another.

gloo's own all-to-all talks to everybody at once, and on a slow link long messages then get in each other's way: from half a
megabyte per pair on it took 1.4 to 1.7 times as long as the bytes need (``docs/log.md``). Here each rank sends to one rank
and receives from one other in each phase, which is how MPI libraries do it. The phases of one exchange are driven by a thread
of its own, so that they go on while other groups are encoded.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

FROM_BYTES = 512 << 10  # per pair; below, talking to all at once is as fast and takes less processor time
PIECE_BYTES = 256 << 10  # a phase carries no more: with longer ones, slow links took up to a quarter longer


class PairwiseAllToAll:
    """One exchange under way. Those of a process group run in the order in which they were made.

    Args:
        messages: one row of bytes per rank.
        reply: of the same shape; the rows received.
        before: the exchange made before this one on the same group, if there was one.
        timeout: for each phase; default: the group's.
    """

    def __init__(
        self,
        messages: Tensor,
        reply: Tensor,
        group: dist.ProcessGroup | None,
        before: PairwiseAllToAll | None,
        timeout: timedelta | None = None,
    ) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(messages, reply, group, before, timeout), name="thinwire-pairs", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until ``reply`` is filled; raises what went wrong, or that it takes longer than ``timeout``."""
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if not self.is_completed():
            raise RuntimeError("the exchange is still under way")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def _run(
        self, messages: Tensor, reply: Tensor, group: Any, before: PairwiseAllToAll | None, timeout: timedelta | None
    ) -> None:
        try:
            if before is not None:
                before.wait()
            _exchange(messages, reply, group, () if timeout is None else (timeout,))
        except BaseException as error:  # handed to the thread that waits
            self._error = error


def _exchange(messages: Tensor, reply: Tensor, group: Any, timeout: tuple[timedelta, ...]) -> None:
    """Phase after phase, always one ahead: on links with latency the next one is under way while this one arrives."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    reply[rank].copy_(messages[rank])
    under_way: tuple[Any, ...] = ()
    for sent, received in zip(messages.split(PIECE_BYTES, dim=1), reply.split(PIECE_BYTES, dim=1), strict=True):
        for distance in range(1, world_size):
            source, target = (rank - distance) % world_size, (rank + distance) % world_size
            started = (
                dist.irecv(received[source], group=group, group_src=source),
                dist.isend(sent[target], group=group, group_dst=target),
            )
            _wait(under_way, timeout)
            under_way = started
    _wait(under_way, timeout)


def _wait(works: tuple[Any, ...], timeout: tuple[timedelta, ...]) -> None:
    for work in works:
        work.wait(*timeout)
