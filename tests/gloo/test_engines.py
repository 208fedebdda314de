"""What an attached model does in training, on two real ranks."""

from __future__ import annotations

import pytest

from gloo.engine_cases import CASES
from gloo.launch import shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    values = shared_launch("engine_cases", 2, timeout_s=190.0).values(case)
    assert values[0] == values[1], "the ranks have come apart"
