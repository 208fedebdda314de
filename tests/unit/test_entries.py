"""Pairs of positions and values: joining them, and exchanging them between two ranks with requests made for all."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.comm import simulate
from thinwire.compressors.shared.entries import Entries, contains, from_rows, summed, swap, swap_bytes, to_rows
from thinwire.core import Step, UnitSpec


def entries(**values: float) -> Entries:
    """``entries(p3=1.0)``: the value 1 at position 3."""
    positions = [int(name[1:]) for name in values]
    return Entries(torch.tensor(positions, dtype=torch.int32), torch.tensor(list(values.values())))


def test_values_at_one_position_are_added_and_positions_ascend() -> None:
    got = summed(torch.tensor([7, 2, 7], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0]))
    assert got.indices.tolist() == [2, 7]
    assert got.values.tolist() == [2.0, 5.0]


def test_rows_hold_each_region_and_lose_their_padding() -> None:
    given = entries(p0=1.0, p3=-2.0, p4=0.5)
    rows = to_rows(given, given.bounds([0, 4, 4, 9]), width=3)
    assert rows.shape == (3, 24)
    positions, values = from_rows(rows[0:1])
    assert (positions.tolist(), values.tolist()) == ([0, 3], [1.0, -2.0])
    assert from_rows(rows[1:2])[0].tolist() == []
    assert from_rows(rows)[1].tolist() == [1.0, -2.0, 0.5]


def test_contains_also_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    some = torch.tensor([1, 5, 9], dtype=torch.int32)
    assert contains(some, torch.tensor([0, 5, 9, 10], dtype=torch.int32)).tolist() == [False, True, True, False]
    assert contains(none, some).tolist() == [False] * 3
    assert contains(some, none).tolist() == []


@pytest.mark.parametrize("partners", [[0], [1, 0], [2, 1, 0], [1, 0, 3, 2], [4, 1, 3, 2, 0], [0, 1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("length", [0, 1, 5, 16])
def test_swap_gives_everybody_what_the_partner_had_for_the_stated_price(partners: list[int], length: int) -> None:
    world_size = len(partners)
    sent = [0] * world_size

    def rank(number: int) -> Generator[Any, Any, Tensor]:
        message = torch.arange(length, dtype=torch.int32) + 100 * number
        return (yield from swap(message, partners, Step(0, UnitSpec.flat(1), number, world_size)))

    got = simulate([rank(number) for number in range(world_size)], sent=sent)
    for number, message in enumerate(got):
        assert message.tolist() == [100 * partners[number] + i for i in range(length)]
    assert sent == [swap_bytes(length, world_size)] * world_size
