"""Cutting a model: every element in exactly one piece, views of the weights themselves, joined again by name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from thinwire.core import CheckpointError, ConfigError
from thinwire.fusion.prepare import prepare
from thinwire.sync.pieces import cut, flat, join, join_states, split, split_states


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    shapes = [draw.choice([(), (0,), (1,), (7,), (300,), (13, 70), (64, 64), (8, 3, 3, 3)]) for _ in range(6)]
    return {f"layer{i}": torch.randn(shape) for i, shape in enumerate([(40, 40), *shapes])}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 13])
@pytest.mark.parametrize("seed", range(6))
def test_every_element_is_in_exactly_one_piece(seed: int, count: int, whole: bool) -> None:
    tensors = random_tensors(seed)
    counted = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    fragments = cut(tensors, count, whole=whole)
    assert len(fragments) == count
    for piece in (piece for fragment in fragments for piece in fragment):
        piece.of(counted[piece.owner]).add_(1)
        assert piece.spec.numel == piece.end - piece.start
        assert piece.name == piece.owner or not whole
    assert all(bool((value == 1).all()) for value in counted.values())


def test_slices_are_of_equal_size_up_to_a_block() -> None:
    tensors = {"a": torch.zeros(100, 100), "b": torch.zeros(3), "c": torch.zeros(200, 77)}
    sizes = [sum(piece.spec.numel for piece in fragment) for fragment in cut(tensors, 4)]
    assert max(sizes) - min(sizes) <= 128
    assert [piece.name for piece in cut(tensors, 2)[0]] == ["a", "b", f"c@0:{cut(tensors, 2)[1][0].start}"]


def test_a_part_of_a_matrix_is_still_compressed_and_a_part_of_a_vector_is_not() -> None:
    first, second = cut({"matrix": torch.zeros(100, 100), "vector": torch.zeros(10_000)}, 3)[:2]
    compressor = prepare("int4")
    assert "int4" in str(compressor.route(first[0].spec))
    assert [str(compressor.route(piece.spec)) for piece in second] == ["ef | int4", "dense"]


def test_views_follow_the_memory() -> None:
    weight = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last).weight
    flat(weight).copy_(torch.arange(60.0))
    assert weight.stride() == (12, 1, 6, 3)
    assert weight.flatten()[1] == 3.0, "the second element in logical order lies three further in memory"
    assert flat(torch.zeros(3, dtype=torch.complex64)).numel() == 6
    with pytest.raises(ConfigError, match="gaps"):
        flat(torch.zeros(4, 4)[:, :2])


def test_what_is_joined_by_name_is_split_again() -> None:
    tensors = {"a": torch.randn(50, 50), "b": torch.randn(9), "c": torch.randn(30, 30)}
    pieces = [piece for fragment in cut(tensors, 3) for piece in fragment]
    values = {piece.name: piece.of(tensors[piece.owner]).clone() for piece in pieces}
    joined = join(reversed(pieces), values)
    assert all(torch.equal(joined[name], tensor.flatten()) for name, tensor in tensors.items())
    again = split(pieces, joined)
    assert again.keys() == values.keys()
    assert all(torch.equal(again[name], value) for name, value in values.items())


def test_states_are_joined_by_name_also_where_a_short_piece_has_none() -> None:
    tensors, compressor = {"a": torch.zeros(80, 40), "b": torch.zeros(40, 10)}, prepare("int4")
    pieces = [piece for fragment in cut(tensors, 3) for piece in fragment]
    routed = {piece.name: compressor.route(piece.spec) for piece in pieces}
    states = {
        piece.name: {key: torch.randn(piece.spec.numel) for key in routed[piece.name].layout()} for piece in pieces
    }
    assert {bool(state) for name, state in states.items() if "a@" in name} == {True, False}, "no piece is short"
    joined = join_states(pieces, states)
    assert set(joined) == {"a", "b"}
    again = split_states(pieces, joined, compressor)
    assert {n: {k: v.tolist() for k, v in s.items()} for n, s in again.items()} == {
        n: {k: v.tolist() for k, v in s.items()} for n, s in states.items()
    }
    key = next(iter(joined["a"]))
    with pytest.raises(CheckpointError, match="elements"):
        split_states(pieces, {**joined, "a": {key: joined["a"][key][1:]}}, compressor)
