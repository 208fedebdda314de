"""The order of messages that the priority benchmark tries: complete, and urgent first where there is a choice."""

import sys
from pathlib import Path

# Benchmarks are no package that is installed; `python -m pytest` would find them, plain `pytest` would not.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.step.without_barrier import urgent_first
from hypothesis import given
from hypothesis import strategies as st


def test_a_free_wire_keeps_the_order_of_readiness() -> None:
    assert urgent_first([0.0, 1.0, 2.0], [0.5, 0.5, 0.5]) == [0, 1, 2]


def test_of_those_that_wait_the_most_urgent_goes_first() -> None:
    # While the first message is on the wire all others become ready; the last one is needed first.
    assert urgent_first([0.0, 1.0, 2.0, 3.0], [10.0, 1.0, 1.0, 1.0]) == [0, 3, 2, 1]


def test_what_is_urgent_but_not_ready_is_not_waited_for() -> None:
    assert urgent_first([0.0, 1.0, 9.0], [2.0, 3.0, 1.0]) == [0, 1, 2]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=12))
def test_every_message_is_sent_once(messages: list[tuple[float, float]]) -> None:
    ready_s = sorted(ready for ready, _ in messages)
    assert sorted(urgent_first(ready_s, [wire for _, wire in messages])) == list(range(len(messages)))
