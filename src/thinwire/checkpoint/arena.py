"""Memory that a training process fills and a writer process reads: no copy in between, and never more than was asked for.

Anonymous memory of the kernel (memfd): it goes when both processes are gone, also after SIGKILL. Who may touch which bytes
is settled by messages: a span belongs to the trainer until it is sent, then to the writer until it is acknowledged.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from contextlib import suppress


class Arena:
    """Shared memory of a fixed size."""

    def __init__(self, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        self.fd = os.memfd_create("thinwire-checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Give the memory back; views of it that tensors still have keep it a little longer."""
        os.close(self.fd)
        with suppress(BufferError):  # unmapped with the last view
            self.map.close()


class Ring:
    """Spans of an arena, taken and given back in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[tuple[int, int]] = deque()  # start, length

    def take(self, size: int) -> int | None:
        """Where ``size`` bytes in a row are free; None where there are none now."""
        if not self._taken:
            start = 0
        else:
            begin, (last, length) = self._taken[0][0], self._taken[-1]
            end = last + length
            if last >= begin:  # taken: [begin, end); free: behind it, then before it
                start = end if size <= self.size - end else 0
                if start == 0 and size > begin:
                    return None
            else:  # taken around the edge; free: [end, begin)
                start = end
                if size > begin - end:
                    return None
        if size > self.size:
            return None
        self._taken.append((start, size))
        return start

    def give_back(self) -> None:
        """The oldest span is free."""
        self._taken.popleft()

    def take_back(self) -> None:
        """The newest span was not needed."""
        self._taken.pop()

    def clear(self) -> None:
        """All of it is free."""
        self._taken.clear()
