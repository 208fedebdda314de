"""What a message costs: seconds on the wire and seconds of processor time, by kind and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from thinwire.comm import GLOO_LANES
from thinwire.core import ConfigError
from thinwire.fusion import Curve
from thinwire.plan.collectives import KINDS, Backend, Kind, Link, collective_s

_SAMPLED_BYTES = tuple(float(4**exponent) for exponent in range(3, 18))  # 64 B to 17 GB


@dataclass(frozen=True)
class Network:
    """Curves of one world size. Sizes are what one rank sends, as ``Request.sent_bytes`` counts.

    Args:
        wire: seconds from start to reply.
        cpu: processor seconds of one rank in that time; kinds that are missing cost none.
        spread: relative spread of the measurements; differences below it mean nothing.
        burst_s: what messages after a rest save in all: shapers (token buckets) let a burst pass before they slow it down,
            and a link gets that back by resting for as long. The curves are of links that had no rest.
        lanes: rounds of a group that travel without waiting for those of others (``comm.transport``).
    """

    world_size: int
    wire: Mapping[Kind, Curve]
    cpu: Mapping[Kind, Curve]
    spread: float = 0.0
    burst_s: float = 0.0
    lanes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("lanes", 1), ("spread", 0), ("burst_s", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {least}")

    def message_s(self, kind: Kind, sent_bytes: float) -> float:
        """Seconds of one message."""
        if kind not in self.wire:
            raise ConfigError(
                f"the probe has no curve for {kind}; it has {sorted(self.wire)}. Run thinwire probe again"
            )
        return self.wire[kind](sent_bytes)

    def cpu_s(self, kind: Kind, sent_bytes: float) -> float:
        """Processor seconds of one message on each rank."""
        return self.cpu[kind](sent_bytes) if kind in self.cpu else 0.0


def network_of_link(
    link: Link, world_size: int, *, backend: Backend = "gloo", cpu: Mapping[Kind, Curve] | None = None
) -> Network:
    """The network that the closed forms predict.

    Args:
        cpu: processor time of messages, for example from a probe on such machines; default: none.
    """
    costs = dict(cpu or {})

    def seconds(kind: Kind, sent_bytes: float) -> float:
        busy_s = costs[kind](sent_bytes) if kind in costs else 0.0
        # On a fast link the processor is what a message waits for.
        return max(collective_s(kind, sent_bytes, world_size, link, backend), busy_s)

    wire = {kind: Curve(tuple((n, seconds(kind, n)) for n in _SAMPLED_BYTES)) for kind in KINDS}
    return Network(world_size, wire, costs, lanes=GLOO_LANES if backend == "gloo" else 1)


def fit_link(network: Network) -> Link:
    """Latency and rate of the ring all-reduce that explains the measured curve.

    The rate is the slope at the largest sizes; a start-up that the ring pays 2(p-1) times is the time of the smallest.
    """
    if network.world_size < 2 or "all_reduce" not in network.wire:
        raise ConfigError(
            f"the probe is of {network.world_size} rank(s) and {sorted(network.wire)}; expected the all_reduce of at least "
            "two. Run thinwire probe again"
        )
    curve = network.wire["all_reduce"]
    slopes = [(right_s - left_s) / (right - left) for (left, left_s), (right, right_s) in pairwise(curve.points)]
    if not slopes or slopes[-1] <= 0:
        raise ConfigError("the all-reduce curve does not rise with the bytes; probe again with larger sizes")
    smallest_s = curve.points[0][1] - curve.points[0][0] * slopes[-1]
    latency_s = max(0.0, smallest_s) / (2 * (network.world_size - 1))
    return Link(8 / slopes[-1], latency_s)


def network_at(network: Network, world_size: int) -> Network:
    """The same links with another number of ranks: measured curves where there are any, closed forms elsewhere."""
    if world_size == network.world_size:
        return network
    other = network_of_link(fit_link(network), world_size, cpu=network.cpu)
    return replace(network, world_size=world_size, wire=other.wire, cpu=other.cpu)
