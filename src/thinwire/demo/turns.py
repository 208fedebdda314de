"""Whose turn it is where contestants share a job: the speed of a machine drifts, and those who take turns drift together."""

from __future__ import annotations

import random


def order_of_turn(turn: int, contestants: int) -> list[int]:
    """Who comes when: turn 0 as they were given, then shuffled each time, so that nobody always follows the same one.

    It depends on the two numbers alone: all ranks take the same turns.
    """
    order = list(range(contestants))
    if turn > 0:
        random.Random(turn).shuffle(order)
    return order
