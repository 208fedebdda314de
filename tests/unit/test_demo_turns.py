"""Turns are fair, and the same on all ranks."""

from benchmarks.step.interleaved import CLOSE, close_ones

from thinwire.demo.turns import order_of_turn


def test_everybody_has_one_turn_in_every_round() -> None:
    for turn in range(20):
        assert sorted(order_of_turn(turn, 7)) == list(range(7))
        assert order_of_turn(turn, 7) == order_of_turn(turn, 7)
    assert order_of_turn(0, 7) == list(range(7))


def test_nobody_always_follows_the_same_one() -> None:
    orders = [order_of_turn(turn, 10) for turn in range(1, 13)]
    before = [{order[order.index(one) - 1] for order in orders if order.index(one) > 0} for one in range(10)]
    assert min(map(len, before)) >= 4


def test_those_who_are_far_behind_the_rival_need_no_more_turns() -> None:
    taken_s = {"fast": [0.1, 0.1], "rival": [1.0, 9.0, 1.0], "close": [CLOSE], "far": [1.01 * CLOSE]}
    assert close_ones(taken_s, "rival") == ["fast", "rival", "close"]
