"""What a collective costs on links that are not here: closed forms in start-up time and bytes.

With p ranks, a start-up of α seconds per message, β seconds per byte and full-duplex ports, n bytes per rank
(for a gather: the message of one rank; S is what one rank sends):

============ ==================== ================================== ==========================
collective   algorithm            seconds                            S
============ ==================== ================================== ==========================
all-reduce   ring                 2(p-1)·α + S·β                     2(p-1)/p · n
all-reduce   recursive doubling   ⌈log2 p⌉·(α + n·β)                 ⌈log2 p⌉ · n
all-gather   ring                 (p-1)·α + S·β                      (p-1)·n
all-gather   recursive doubling   ⌈log2 p⌉·α + S·β                   (p-1)·n
all-to-all   direct               α + S·β                            (p-1)/p · n
broadcast    binomial tree        ⌈log2 p⌉·(α + n·β)                 (p-1)/p · n on average
============ ==================== ================================== ==========================

gloo reduces and gathers by rings; NCCL takes what is faster. For p that are no power of two, recursive doubling needs up to
two further messages to fold the surplus ranks in and out; they are counted for reductions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from thinwire.comm.piggyback import Kind as Kind
from thinwire.core import ConfigError

Backend = Literal["gloo", "nccl"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all", "broadcast")

# A full Ethernet frame of 1538 bytes on the wire carries 1448 bytes of TCP payload.
ETHERNET_EFFICIENCY = 1448 / 1538
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gmk]?)bit")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")
_BITS = {"g": 1e9, "m": 1e6, "k": 1e3, "": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True)
class Link:
    """A rank's connection to the others.

    Args:
        bits_per_s: payload rate in each direction.
        latency_s: from the start of one message to its first byte at the other end.
    """

    bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bits_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise ConfigError(f"a link of {self.bits_per_s} bit/s and {self.latency_s} s latency cannot be; check both")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds that one byte of payload occupies the link."""
        return 8 / self.bits_per_s


def parse_link(text: str) -> Link:
    """``"200mbit,1ms"``: the rate on the cable, then the latency (default 0.1 ms). Ethernet and TCP headers are taken off.

    Raises:
        ConfigError: anything else.
    """
    rate_text, _, time_text = (part.strip().lower() for part in text.partition(","))
    rate, time = _RATE.fullmatch(rate_text), _TIME.fullmatch(time_text or "100us")
    if rate is None or time is None:
        raise ConfigError(f"link is {text!r}; expected a rate and a latency such as '200mbit,1ms' or '10gbit,50us'")
    bits_per_s = float(rate[1]) * _BITS[rate[2]]
    return Link(bits_per_s * ETHERNET_EFFICIENCY, float(time[1]) * _SECONDS[time[2]])


def collective_s(kind: Kind, sent_bytes: float, world_size: int, link: Link, backend: Backend = "gloo") -> float:
    """Seconds of a collective in which every rank sends ``sent_bytes``, as ``Request.sent_bytes`` counts them."""
    if world_size < 2:
        return 0.0
    match kind:
        case "all_reduce":
            tensor_bytes = sent_bytes * world_size / (2 * (world_size - 1))
            ring_s = ring_all_reduce_s(tensor_bytes, world_size, link)
            return ring_s if backend == "gloo" else min(ring_s, doubling_all_reduce_s(tensor_bytes, world_size, link))
        case "all_gather":
            rounds = world_size - 1 if backend == "gloo" else math.ceil(math.log2(world_size))
            return rounds * link.latency_s + sent_bytes * link.seconds_per_byte
        case "all_to_all":
            return link.latency_s + sent_bytes * link.seconds_per_byte
        case "broadcast":
            return tree_broadcast_s(sent_bytes * world_size / (world_size - 1), world_size, link)


def ring_all_reduce_s(tensor_bytes: float, world_size: int, link: Link) -> float:
    """Reduce-scatter and all-gather around a ring: every rank sends 2(p-1) pieces of n/p bytes."""
    piece_s = link.latency_s + tensor_bytes / world_size * link.seconds_per_byte
    return 2 * (world_size - 1) * piece_s


def doubling_all_reduce_s(tensor_bytes: float, world_size: int, link: Link) -> float:
    """Partners at distance 1, 2, 4, ... exchange whole tensors; surplus ranks are folded in first and served last."""
    power = 1 << (world_size.bit_length() - 1)
    rounds = power.bit_length() - 1 + (0 if power == world_size else 2)
    return rounds * (link.latency_s + tensor_bytes * link.seconds_per_byte)


def tree_broadcast_s(tensor_bytes: float, world_size: int, link: Link) -> float:
    """A binomial tree: in every round each rank that has the tensor gives it to one that has not."""
    return math.ceil(math.log2(world_size)) * (link.latency_s + tensor_bytes * link.seconds_per_byte)
