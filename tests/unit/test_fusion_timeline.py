"""The step simulator and its drawing, on steps worked by hand."""

from __future__ import annotations

import io

from rich.console import Console

from thinwire.core import TensorSpec
from thinwire.fusion import (
    Curve,
    Profile,
    Sent,
    TensorProfile,
    Timeline,
    draw,
    simulate_split_step,
    simulate_step,
    ssfusion,
    unfused_groups,
)

# Ready at 1, 2, 3 s; encoding 1 s per 100 elements; messages 1 s + 1 s per 400 bytes.
PROFILE = Profile(
    tuple(TensorProfile(TensorSpec(f"t{i}", (100,)), float(i + 1)) for i in range(3)),
    encode=Curve(((0.0, 0.0), (100.0, 1.0))),
    message=Curve(((0.0, 1.0), (400.0, 2.0))),
)


def test_a_step_without_fusion() -> None:
    timeline = simulate_step(PROFILE, unfused_groups(PROFILE.specs))
    assert timeline.messages == (
        Sent(1, 1.0, 1.0, 2.0, 2.0, 4.0),
        Sent(1, 2.0, 2.0, 3.0, 4.0, 6.0),
        Sent(1, 3.0, 3.0, 4.0, 6.0, 8.0),
    )
    assert (timeline.finish_s, timeline.exposed_s) == (8.0, 5.0)


def test_a_step_with_one_group() -> None:
    timeline = simulate_step(PROFILE, [PROFILE.specs])
    assert timeline.messages == (Sent(3, 3.0, 3.0, 6.0, 6.0, 10.0),)


def test_the_dense_part_travels_while_the_sparse_part_is_selected() -> None:
    """t0 (1000) is sparse, t1 and t2 (10 each) are dense: their message starts at 3 s, next to the encoding of t0."""
    profile = Profile(
        tuple(TensorProfile(TensorSpec(f"t{i}", (size,)), float(i + 1)) for i, size in enumerate((1000, 10, 10))),
        encode=Curve(((0.0, 1.0), (1000.0, 4.0))),
        message=Curve(((0.0, 1.0),)),
        density=0.1,
        bytes_per_elem=8.0,
    )
    dense, sparse = simulate_split_step(profile, ssfusion(profile)).messages
    assert dense == Sent(2, 3.0, 3.0, 3.0, 3.0, 4.0)
    assert sparse == Sent(1, 1.0, 3.0, 7.0, 7.0, 8.0)


def test_a_model_without_gradients() -> None:
    empty = Profile((), PROFILE.encode, PROFILE.message)
    timeline = simulate_step(empty, [])
    assert timeline == Timeline((), 0.0)
    assert (timeline.finish_s, timeline.exposed_s) == (0.0, 0.0)
    assert draw(timeline) == "nothing to send"


def test_the_drawing_shows_three_lanes_and_the_wait() -> None:
    lines = draw(simulate_step(PROFILE, unfused_groups(PROFILE.specs)), width=16).splitlines()
    assert [line.rstrip() for line in lines] == [
        "backward 001122··········",
        "encode   ··001122········",
        "wire     ····000011112222",
        "         0      8000.0 ms",
        "         3 message(s), backward 3000.0 ms, waiting 5000.0 ms",
    ]


def test_the_shortest_message_still_gets_a_cell() -> None:
    sent = [Sent(1, 1.0, 1.0, 1.001, 1.001, 1.002), Sent(1, 9.0, 9.0, 9.001, 9.001, 10.0)]
    backward, encode, wire = draw(Timeline(tuple(sent), 9.0), width=10).splitlines()[:3]
    assert (backward, encode, wire) == ("backward 011111111·", "encode   ·0·······1", "wire     ·0·······1")


def test_the_drawing_has_nothing_that_rich_takes_for_markup() -> None:
    many = [Sent(1, i + 1.0, i + 1.0, i + 1.5, i + 1.5, i + 2.0) for i in range(80)]
    text = draw(Timeline(tuple(many), 80.0))
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(text)
    assert isinstance(console.file, io.StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [x.rstrip() for x in text.splitlines()]
