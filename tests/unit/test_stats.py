"""The totals that users see."""

from __future__ import annotations

import dataclasses

import pytest

from thinwire import WireStats


def test_reduction_factor() -> None:
    assert WireStats(wire_bytes=10, dense_bytes=75).reduction_factor == 7.5
    assert WireStats().reduction_factor == 1.0, "one rank sends nothing at all"


def test_stats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WireStats().steps = 1  # type: ignore[misc]
