"""Policies with local steps, on two real processes."""

from __future__ import annotations

import pytest

from gloo.launch import shared_launch
from gloo.sync_cases import CASES

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    shared_launch("sync_cases", 2, timeout_s=190.0).values(case)
