"""Four real processes: gloo reproduces the simulator, and long runs keep the replicas identical."""

from __future__ import annotations

import pytest

from gloo.four_cases import CASES
from gloo.launch import shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case: str) -> None:
    values = shared_launch("four_cases", 4, timeout_s=190.0).values(case)
    assert all(value == values[0] for value in values), "the ranks have come apart"
