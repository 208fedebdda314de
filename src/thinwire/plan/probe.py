"""Measure a cluster once: every collective, every compressor, and what one rank computes and copies per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.comm import Tag, Transport
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, ConfigError, Request
from thinwire.core.schema import from_json, load_json, save_json, to_json
from thinwire.fusion import Curve
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost, measure_codec
from thinwire.plan.collectives import KINDS, Kind
from thinwire.plan.network import Network
from thinwire.plan.roofs import Roofs

_REMEDY = "run thinwire probe again"
FIRST_BYTES = 1 << 10
GROWTH = 4
LAST_BYTES = 64 << 20
PATIENCE_S = 0.15  # no larger messages once one takes this long: beyond, the curve goes on in a straight line
REPEATS = 9
FEWEST_REPEATS = 3
SECONDS_PER_SIZE = 0.25
CHECK_S = 0.03  # of the messages that say whether a network has changed, and whether it lets bursts pass
SAME_NETWORK = 0.2  # it has not if that takes by less than this longer or shorter
BURST_REPEATS = 2
CLEAR_BURST = 0.15  # a message must be shorter by this after a rest

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured, when and where.

    Args:
        facts: what identifies the cluster, for people and for the cache: hosts, backend, link.
        codecs: by spec, as ``str(make(spec))`` writes it.
    """

    VERSION: ClassVar[int] = 1

    cluster: Cluster
    network: Network
    codecs: Mapping[str, CodecCost]
    roofs: Roofs
    facts: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values with a version."""
        plain: dict[str, Any] = to_json(self)
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probe:
        """What ``to_json`` described.

        Raises:
            ConfigError: written by another version, or no probe at all.
        """
        return from_json(cls, values, what="probe", remedy=_REMEDY)

    def save(self, path: Path) -> None:
        """Write as JSON; the folder is made."""
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read what ``save`` wrote."""
        return cls.from_json(load_json(path, what="probe", remedy=_REMEDY))


def measure_network(
    transport: Transport,
    *,
    kinds: Sequence[Kind] = KINDS,
    largest_bytes: int = LAST_BYTES,
    patience_s: float = PATIENCE_S,
    repeats: int = REPEATS,
    fewest_repeats: int = FEWEST_REPEATS,
    seconds_per_size: float = SECONDS_PER_SIZE,
    device: torch.device | None = None,
    progress: Progress = lambda done: None,
) -> Network:
    """Time every collective over a log-spaced sweep of sizes. All ranks call it together and get the same curves.

    Args:
        kinds: the collectives to time.
        largest_bytes: the largest that one rank is to send, such as the gradient bytes of the model.
        patience_s: no larger messages once one takes this long.
        repeats: of each size; fewer, down to ``fewest_repeats``, where they would take more than ``seconds_per_size``.
        progress: called after each size with what was measured.

    Raises:
        ConfigError: a single rank has no network.
    """
    if transport.world_size < 2:
        raise ConfigError("one rank has no network to probe; start at least two (thinwire probe --hosts 2)")
    wire: dict[Kind, Curve] = {}
    cpu: dict[Kind, Curve] = {}
    spreads: list[float] = []
    for kind in kinds:
        samples: list[_Sample] = []
        for sent_bytes in _sizes(largest_bytes):
            # From agreed numbers only: all ranks must repeat alike.
            expected_s = GROWTH * samples[-1].wire_s if samples else 0.0
            count = max(fewest_repeats, min(repeats, int(seconds_per_size / max(expected_s, 1e-6))))
            sample = _agree(_time(transport, kind, sent_bytes, count, device), transport, device)
            samples.append(sample)
            progress(f"{kind} {sent_bytes} B")
            if sample.wire_s > patience_s:
                break
        wire[kind] = Curve.fit((one.sent_bytes, one.wire_s) for one in samples)
        cpu[kind] = Curve.fit((one.sent_bytes, one.cpu_s) for one in samples)
        spreads += [one.spread for one in samples]
    network = Network(transport.world_size, wire, cpu, median(spreads), lanes=transport.lanes)
    return replace(network, burst_s=_burst_s(network, transport, device))


def _burst_s(network: Network, transport: Transport, device: torch.device | None) -> float:
    """By how much a message is shorter after a rest as long as itself; nothing where all of them are short anyway."""
    points = network.wire["all_reduce"].points if "all_reduce" in network.wire else ()
    sent_bytes = next((int(size) for size, seconds in points if seconds >= CHECK_S), None)
    if sent_bytes is None:
        return 0.0
    busy = _agree(_time(transport, "all_reduce", sent_bytes, BURST_REPEATS, device), transport, device)
    rested = _time(transport, "all_reduce", sent_bytes, BURST_REPEATS, device, rest_s=busy.wire_s)
    saved_s = busy.wire_s - _agree(rested, transport, device).wire_s
    return saved_s if saved_s > CLEAR_BURST * busy.wire_s else 0.0


def holds(network: Network, transport: Transport, device: torch.device | None = None) -> bool:
    """Whether an all-reduce still takes what its curve says. All ranks call it together and get the same answer."""
    curve = network.wire["all_reduce"]
    sent_bytes = max((size for size, seconds in curve.points if seconds <= CHECK_S), default=curve.points[0][0])
    sample = _agree(_time(transport, "all_reduce", int(sent_bytes), REPEATS, device), transport, device)
    return abs(sample.wire_s / max(curve(sample.sent_bytes), 1e-9) - 1) <= SAME_NETWORK


def measure_codecs(specs: Sequence[str], progress: Progress = lambda done: None) -> dict[str, CodecCost]:
    """Time the compressors on this machine, one after the other."""
    costs = {}
    for spec in specs:
        costs[spec] = measure_codec(spec)
        progress(spec)
    return costs


def planned_sizes(largest_bytes: int) -> int:
    """How many sizes ``measure_network`` tries if no message takes too long: the length of a progress bar."""
    return len(KINDS) * len(list(_sizes(largest_bytes)))


@dataclass(frozen=True)
class _Sample:
    sent_bytes: float
    wire_s: float
    cpu_s: float
    spread: float


def _sizes(largest_bytes: int) -> Iterator[int]:
    sent_bytes = FIRST_BYTES
    while sent_bytes < largest_bytes:
        yield sent_bytes
        sent_bytes *= GROWTH
    yield sent_bytes


def _time(
    transport: Transport, kind: Kind, sent_bytes: int, repeats: int, device: torch.device | None, rest_s: float = 0.0
) -> _Sample:
    """On this rank: the median of single messages, and the processor time (of all threads) of one.

    Args:
        rest_s: before each of them.
    """
    request = _request(kind, sent_bytes, transport.world_size, device)
    transport.start(request, Tag()).wait()
    seconds: list[float] = []
    cpu_began_s = time.process_time()
    for _ in range(repeats):
        time.sleep(rest_s)
        began_s = time.perf_counter()
        transport.start(request, Tag()).wait()
        _synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    cpu_s = (time.process_time() - cpu_began_s) / repeats
    ordered, middle_s = sorted(seconds), median(seconds)
    spread = (ordered[(3 * repeats) // 4] - ordered[repeats // 4]) / middle_s
    return _Sample(request.sent_bytes(transport.world_size), middle_s, cpu_s, spread)


def _agree(sample: _Sample, transport: Transport, device: torch.device | None) -> _Sample:
    """The mean over the ranks: all must take the same decision about larger sizes, and write the same curves."""
    mine = torch.tensor([sample.wire_s, sample.cpu_s, sample.spread], dtype=torch.float64, device=device)
    reply = transport.start(AllReduce(mine), Tag()).wait()
    assert isinstance(reply, Tensor)
    wire_s, cpu_s, spread = reply.tolist()
    return _Sample(sample.sent_bytes, wire_s, cpu_s, spread)


def _request(kind: Kind, sent_bytes: int, world_size: int, device: torch.device | None) -> Request:
    """A request in which one rank sends about ``sent_bytes``."""
    others = world_size - 1
    match kind:
        case "all_reduce":
            return AllReduce(torch.zeros(-(-sent_bytes * world_size // (8 * others)), device=device))
        case "all_gather":
            return AllGather(torch.zeros(-(-sent_bytes // others), dtype=torch.uint8, device=device))
        case "all_to_all":
            return AllToAll(torch.zeros((world_size, -(-sent_bytes // others)), dtype=torch.uint8, device=device))
        case "broadcast":
            return Broadcast(torch.zeros(-(-sent_bytes * world_size // (4 * others)), device=device))


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
