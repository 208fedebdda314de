"""Several channels at once, on two real ranks."""

from __future__ import annotations

import pytest

from gloo.channel_cases import CASES
from gloo.launch import shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    shared_launch("channel_cases", 2, timeout_s=190.0).values(case)
