"""Kill in the middle of a flight, restart, load: bit for bit the run that was never interrupted."""

from __future__ import annotations

import pytest

from gloo.launch import Report, launch
from gloo.sync_resume_cases import CASES

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(230)]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return launch("sync_resume_cases", 2, folder=folder), launch("sync_resume_cases", 2, folder=folder)


@pytest.mark.parametrize("case", CASES)
def test_resumed_equals_uninterrupted(launches: tuple[Report, Report], case: str) -> None:
    uninterrupted, resumed = (report.values(case) for report in launches)
    assert resumed == uninterrupted
    assert uninterrupted[0] != uninterrupted[1], "each rank has weights of its own; equal digests compare nothing"
