"""How many steps each cell gets, so that the whole contest fits into its time. Estimates are crude, and on the long side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contest.lineup import AUTO, SAFE_SPECS, STOCK_DDP
from benchmarks.step.interleaved import CLOSE, warmup_steps

from thinwire.autopilot.controller import planned_after
from thinwire.core import TensorSpec
from thinwire.demo.settings import Contestant
from thinwire.fusion.prepare import prepare, wire_bytes
from thinwire.plan.price import DENSE

FEWEST_STEPS, MOST_STEPS = 3, 72  # of a contestant in a cell
MOST_ROUNDS = 12  # all of them for those who are about as fast as ``auto``
START_S = 25.0  # processes, ten copies of the model, the corpus, and a plan
FRAMING = 1.06  # Ethernet, IP and TCP headers
OVERHEAD = 1.1  # what communication costs where the network is no limit: ranks share cores
UNSHAPED_BITS_PER_S = 5e9


@dataclass(frozen=True)
class CellCost:
    """What a cell takes.

    Args:
        fixed_s: start and warm-up.
        step_s: one step of every contestant.
        close_step_s: one step of those who are about as fast as ``auto``.
    """

    fixed_s: float
    step_s: float
    close_step_s: float = 0.0


@dataclass(frozen=True)
class Size:
    """Of one cell; ``seconds`` is the estimate of all of it. See ``Turns`` for the others."""

    rounds: int
    steps_per_turn: int
    seconds: float
    close_rounds: int = 0


def estimate_step_s(contestant: Contestant, tensors: Sequence[TensorSpec], floor_s: float, hosts: int) -> float:
    """The floor and the bytes, one after the other: what hides behind backward is not counted."""
    if contestant.mode == "floor":
        return floor_s
    specs = {
        "ddp": [DENSE],
        "ddp_fp16": ["fp16"],
        "ddp_powersgd": [f"powersgd(rank={contestant.powersgd_rank})"],
        "thinwire": SAFE_SPECS if contestant.compress == "auto" else [contestant.compress],
    }[contestant.mode]
    sent_bytes = min(wire_bytes(tensors, prepare(spec), hosts) for spec in specs)
    return OVERHEAD * floor_s + FRAMING * 8 * sent_bytes / (contestant.bits_per_s or UNSHAPED_BITS_PER_S)


def cost_of_cell(
    contestants: Sequence[Contestant], tensors: Sequence[TensorSpec], floor_s: float, hosts: int
) -> CellCost:
    """Estimate one cell: rank 0's weights for all but the floor, the warm-up, in which ``auto`` is dense, and the steps."""
    steps_s = {one.name: estimate_step_s(one, tensors, floor_s, hosts) for one in contestants}
    warmup_s = sum(warmup_steps(one) * steps_s[one.name] for one in contestants)
    if AUTO in steps_s and STOCK_DDP in steps_s:
        warmup_s += planned_after(steps_s[STOCK_DDP], floor_s) * (steps_s[STOCK_DDP] - steps_s[AUTO])
    rounds = math.ceil(math.log2(hosts))  # of a tree
    copies = rounds * sum(one.mode != "floor" for one in contestants)
    weight_bits = FRAMING * 32 * sum(tensor.numel for tensor in tensors)
    weights_s = copies * weight_bits / (contestants[0].bits_per_s or UNSHAPED_BITS_PER_S)
    close_s = sum(step_s for step_s in steps_s.values() if step_s <= CLOSE * steps_s.get(AUTO, 0.0))
    return CellCost(START_S + weights_s + warmup_s, sum(steps_s.values()), close_s)


def size_cells(costs: Sequence[CellCost], budget_s: float) -> list[Size]:
    """Give every cell the same time for its turns, within the fewest and the most steps, so that all fit the budget.

    Where even the fewest steps do not fit, these are what they get: the sum of the estimates then says so.
    """
    low_s, high_s = 0.0, max(MOST_STEPS * cost.step_s for cost in costs)
    for _ in range(40):
        share_s = (low_s + high_s) / 2
        if sum(_size(cost, share_s).seconds for cost in costs) <= budget_s:
            low_s = share_s
        else:
            high_s = share_s
    return [_size(cost, low_s) for cost in costs]


def _size(cost: CellCost, share_s: float) -> Size:
    steps = min(max(int(share_s / cost.step_s), FEWEST_STEPS), MOST_STEPS)
    rounds = min(steps, MOST_ROUNDS)
    return sized(cost, rounds, steps // rounds, MOST_ROUNDS - rounds)


def sized(cost: CellCost, rounds: int, steps_per_turn: int, close_rounds: int = 0) -> Size:
    """A cell of a given size."""
    turns_s = steps_per_turn * (rounds * cost.step_s + close_rounds * cost.close_step_s)
    return Size(rounds, steps_per_turn, cost.fixed_s + turns_s, close_rounds)


def seconds_left(done: Sequence[tuple[float, float]], waiting_s: Sequence[float]) -> float:
    """What the waiting cells will take, corrected by how far off the estimates of those done were.

    Args:
        done: (estimated, measured) seconds.
        waiting_s: estimates.
    """
    estimated_s, measured_s = (sum(column) for column in zip(*done, strict=True)) if done else (1.0, 1.0)
    return sum(waiting_s) * measured_s / estimated_s
