"""Precision on four real processes: wires that do not underflow, scales that ranks agree on, LayerScaler under DDP."""

from __future__ import annotations

import pytest

from gloo.launch import shared_launch
from gloo.precision_cases import CASES

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case: str) -> None:
    values = shared_launch("precision_cases", 4, timeout_s=140.0).values(case)
    assert all(value == values[0] for value in values), "the ranks have come apart"
