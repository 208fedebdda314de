"""Optimizers that know the age of what they receive, on two real ranks."""

from __future__ import annotations

import pytest

from gloo.launch import shared_launch
from gloo.optim_cases import CASES

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    values = shared_launch("optim_cases", 2, timeout_s=140.0).values(case)
    assert values[0] == values[1], "the ranks have come apart"
