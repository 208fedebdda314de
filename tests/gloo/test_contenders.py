"""DDP with torch's hooks, as the benchmarks use it, on two real ranks."""

from __future__ import annotations

import pytest

from gloo.contender_cases import CASES
from gloo.launch import shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(100)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    values = shared_launch("contender_cases", 2, timeout_s=60.0).values(case)
    assert values[0] == values[1], "the replicas have come apart"
