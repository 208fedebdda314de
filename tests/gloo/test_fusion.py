"""Groups that follow what was measured, on two real ranks."""

from __future__ import annotations

import pytest

from gloo.fusion_cases import CASES
from gloo.launch import shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    values = shared_launch("fusion_cases", 2, timeout_s=140.0).values(case)
    assert values[0] == values[1], "the ranks have come apart"
