"""Borders that give every rank the same share of what is selected."""

from __future__ import annotations

import pytest
import torch

from thinwire.compressors.shared import regions
from thinwire.core import TensorSpec, UnitSpec

UNIT = UnitSpec(
    (TensorSpec("a", (1000,)), TensorSpec("none", (0,)), TensorSpec("tiny", (3,)), TensorSpec("b", (70, 10)))
)


def test_every_position_is_counted_in_the_bucket_of_its_tensor() -> None:
    everything = regions.histogram(torch.arange(UNIT.numel, dtype=torch.int32), UNIT)
    assert everything.numel() == regions.bucket_elems(UNIT) == 32 + 0 + 3 + 32
    assert torch.equal(everything.double(), regions.bucket_edges(UNIT).diff().double())
    first_of_b = torch.tensor([1003], dtype=torch.int32)
    assert regions.histogram(first_of_b, UNIT).nonzero().tolist() == [[35]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_without_knowledge_regions_are_equally_long(world_size: int) -> None:
    borders = regions.borders(torch.zeros(regions.bucket_elems(UNIT)), UNIT, world_size)
    lengths = torch.tensor(borders).diff()
    assert borders[0] == 0
    assert borders[-1] == UNIT.numel
    assert lengths.max() - lengths.min() <= 2


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_regions_hold_equally_many_entries_however_these_lie(world_size: int) -> None:
    crowded = torch.cat([torch.arange(0, 200), torch.arange(200, 1703, 20)]).to(torch.int32)
    borders = torch.tensor(regions.borders(regions.histogram(crowded, UNIT), UNIT, world_size), dtype=torch.int32)
    held = torch.searchsorted(crowded, borders).diff()
    assert borders.diff().min() >= 0
    assert held.sum() == crowded.numel()
    assert held.max() < 1.35 * crowded.numel() / world_size
    evenly = torch.searchsorted(crowded, torch.linspace(0, 1703, world_size + 1)).diff()
    assert evenly.max() > held.max()


def test_an_empty_unit_has_empty_regions() -> None:
    assert regions.borders(torch.zeros(0), UnitSpec.flat(0), 3) == [0, 0, 0, 0]
