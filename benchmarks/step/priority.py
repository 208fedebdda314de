"""Would it pay to send first what the next forward needs first (ByteScheduler, SOSP'19)?

A simulation: no engine here lets forward begin before all gradients have arrived, and this is what says whether one should.
``python benchmarks/step/priority.py --floor 0.785`` prints, for each rate and compressor, the step with the barrier that
training loops have today, and without it, in order of readiness and in order of need. Messages are thinwire's own groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from thinwire.core import TensorSpec
from thinwire.demo.model import build_model
from thinwire.engine.groups import Group, make_group, prepare
from thinwire.fusion import parse_fusion
from thinwire.lab import parse_rate

STARTUP_S = 1e-3
FORWARD_SHARE = 1 / 3
ITERATIONS = 30


@dataclass(frozen=True)
class Message:
    """One group, in the order in which backward makes them ready."""

    ready_s: float  # after the start of backward
    wire_s: float
    forward_s: float  # of its layers


def messages(model: nn.Module, compress: str, bits_per_s: float, floor_s: float, world_size: int) -> list[Message]:
    """The groups of a model as messages; compute time is proportional to the number of parameters."""
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()][::-1]
    compressor = prepare(compress)
    groups = [make_group(tensors, compressor) for tensors in parse_fusion("auto")(specs)]
    total = sum(tensor.numel for tensor in specs)
    made, done = [], 0
    for group in groups:
        elems = sum(tensor.numel for tensor in group.tensors)
        done += elems
        wire_s = STARTUP_S + 8 * _sent_bytes(group, world_size) / bits_per_s
        backward_s = floor_s * (1 - FORWARD_SHARE)
        made.append(Message(backward_s * done / total, wire_s, floor_s * FORWARD_SHARE * elems / total))
    return made


def _sent_bytes(group: Group, world_size: int) -> int:
    return sum(unit.compressor.wire_bytes(unit.spec, world_size) for unit in group.units)


def with_barrier(sent: Sequence[Message]) -> float:
    """Forward waits for everything: the order cannot matter."""
    free_s = 0.0
    for one in sent:
        free_s = max(free_s, one.ready_s) + one.wire_s
    return sum(one.forward_s for one in sent) + max(free_s, sent[-1].ready_s)


def without_barrier(sent: Sequence[Message], urgency: Callable[[int], int]) -> float:
    """The step in the long run if each layer's forward waits for its own message only.

    Args:
        urgency: of the messages that are ready, the one with the smallest is sent first.
    """
    starts, wire_free_s = [0.0], 0.0
    for _ in range(ITERATIONS):
        arrived_s, wire_free_s = _transfers(sent, starts[-1], wire_free_s, urgency)
        now_s = starts[-1] + sent[-1].ready_s
        for index in reversed(range(len(sent))):
            now_s = max(now_s, arrived_s[index]) + sent[index].forward_s
        starts.append(now_s)
    half = ITERATIONS // 2
    return (starts[-1] - starts[half]) / (ITERATIONS - half)


def _transfers(
    sent: Sequence[Message], start_s: float, free_s: float, urgency: Callable[[int], int]
) -> tuple[dict[int, float], float]:
    """When each message of a backward pass has arrived, and when the wire is free."""
    waiting, arrived_s = set(range(len(sent))), {}
    while waiting:
        ready = {index for index in waiting if start_s + sent[index].ready_s <= free_s}
        if not ready:
            free_s = start_s + min(sent[index].ready_s for index in waiting)
            continue
        index = min(ready, key=urgency)
        waiting.discard(index)
        free_s = arrived_s[index] = free_s + sent[index].wire_s
    return arrived_s, free_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floor", type=float, default=0.785, help="seconds of a step without communication")
    parser.add_argument("--model", default="small", help="a GPT: tiny, small or medium; or cnn")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", default="1gbit,200mbit,50mbit")
    arguments = parser.parse_args()
    model = build_model(arguments.model, 128, 0)
    print("| rate | compressor | barrier | no barrier, as ready | no barrier, as needed | gain of the order |")
    print("|---|---|---|---|---|---|")
    for rate in arguments.rates.split(","):
        bits_per_s = parse_rate(rate)
        if bits_per_s is None:
            raise SystemExit(f"--rates: got {rate!r}, expected rates with a limit, for example 200mbit")
        for compress in ("dense", "int4", "topk(density=0.01)"):
            sent = messages(model, compress, bits_per_s, arguments.floor, arguments.hosts)
            barrier = with_barrier(sent)
            ready, needed = without_barrier(sent, lambda i: i), without_barrier(sent, lambda i: -i)
            print(
                f"| {rate} | {compress} | {barrier:.3f} s | {ready:.3f} s | {needed:.3f} s | {1 - needed / ready:.1%} |"
            )


if __name__ == "__main__":
    main()
