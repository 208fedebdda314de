"""Whose turn it is where contestants share a job: the speed of a machine drifts, and those who take turns drift together."""

from __future__ import annotations


def order_of_turn(turn: int, contestants: int) -> list[int]:
    """Who comes when, as indices: every round begins with another one, so that nobody always follows the same."""
    first = turn % contestants
    return [*range(first, contestants), *range(first)]
