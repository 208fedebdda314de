"""Transports around a transport: throttle, delay, break."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from thinwire.comm.transport import Pending, Tag, Transport
from thinwire.core import AllGather, Reply, Request, TransportError


class _Around:
    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world_size, self.lanes = inner.rank, inner.world_size, inner.lanes


@dataclass
class _Held:
    """A request whose reply is held back until ``arrival_s`` (of ``time.monotonic``)."""

    inner: Pending
    arrival_s: float

    @property
    def sent_bytes(self) -> int:
        return self.inner.sent_bytes

    def wait(self) -> Reply:
        reply = self.inner.wait()
        time.sleep(max(0.0, self.arrival_s - time.monotonic()))
        return reply


class Throttled(_Around):
    """Emulates a link: messages leave one after the other at ``bits_per_s`` and arrive ``latency_s`` later.

    An emulation: it delays what goes through this transport and knows nothing of packets, of the receiving side or of
    other traffic. For real shaped links use the lab.
    """

    def __init__(self, inner: Transport, bits_per_s: float, latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self.bits_per_s, self.latency_s = bits_per_s, latency_s
        self._free_at_s = 0.0

    def start(self, request: Request, tag: Tag) -> Pending:
        duration_s = 8 * request.sent_bytes(self.world_size) / self.bits_per_s
        self._free_at_s = max(self._free_at_s, time.monotonic()) + duration_s
        arrival_s = self._free_at_s + self.latency_s
        return _Held(self.inner.start(request, tag), arrival_s)


class Delayed(_Around):
    """Completes messages late, by ``delay_s(tag)`` seconds: for tests of order and of late completion."""

    def __init__(self, inner: Transport, delay_s: Callable[[Tag], float]) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    def start(self, request: Request, tag: Tag) -> Pending:
        return _Held(self.inner.start(request, tag), time.monotonic() + self.delay_s(tag))


class Faulty(_Around):
    """Breaks chosen messages: for tests.

    Args:
        fail_at: steps at which this rank's request fails with a TransportError.
        corrupt_at: steps at which one bit of this rank's gathered message is flipped.
    """

    def __init__(self, inner: Transport, *, fail_at: Iterable[int] = (), corrupt_at: Iterable[int] = ()) -> None:
        super().__init__(inner)
        self.fail_at, self.corrupt_at = frozenset(fail_at), frozenset(corrupt_at)

    def start(self, request: Request, tag: Tag) -> Pending:
        if tag.step in self.fail_at:
            raise TransportError(f"injected fault on rank {self.rank} in {tag}")
        if tag.step in self.corrupt_at and isinstance(request, AllGather):
            broken = request.message.clone()
            broken[-1] ^= torch.tensor(1, dtype=torch.uint8)
            request = replace(request, message=broken)
        return self.inner.start(request, tag)
