"""Ranks that differ, break, die or stall: everybody else ends soon, with an error that says who and where."""

from __future__ import annotations

import os

import pytest

from gloo import absent_cases, fault_cases, kill_cases, stop_cases
from gloo.launch import Report, launch, shared_launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]


@pytest.mark.parametrize("case", fault_cases.CASES)
def test_on_three_ranks(case: str) -> None:
    values = shared_launch("fault_cases", 3).values(case)
    assert values[0] == values[1] == values[2]


def _assert_all_gone(report: Report) -> None:
    for pid in report.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_killed_rank() -> None:
    report = launch("kill_cases", 3, timeout_s=90.0)
    assert report.exit_codes[kill_cases.VICTIM] == -9
    for rank in (0, 1):
        outcome = report.outcomes[rank]["survivors_end"]
        assert "error" not in outcome, outcome["error"]
        assert outcome["value"]["seconds"] < 60
        assert outcome["value"]["state_kept"], "a step that failed half-way was applied"
        assert "step 1" in outcome["value"]["message"]
        assert "checkpoint" in outcome["value"]["message"]
    _assert_all_gone(report)


def test_stopped_rank() -> None:
    report = launch("stop_cases", 3, timeout_s=90.0)
    assert report.exit_codes[stop_cases.VICTIM] is None, "it should still be stopped when the others have ended"
    for rank in (0, 2):
        outcome = report.outcomes[rank]["survivors_give_up"]
        assert "error" not in outcome, outcome["error"]
        assert stop_cases.TIMEOUT_S * 0.5 < outcome["value"]["seconds"] < 60
        assert "step 2" in outcome["value"]["message"]
    assert "Ranks 1 failed" in report.outcomes[0]["survivors_give_up"]["value"]["message"]
    _assert_all_gone(report)


@pytest.mark.parametrize("case", ["leaves", "never_comes", "stops_while_attaching", "dies_while_attaching"])
def test_absent_rank(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody else gives up soon, and says which rank is missing."""
    monkeypatch.setenv("ABSENT_CASE", case)
    report = launch("absent_cases", 3, timeout_s=60.0)
    for rank in (0, 2):
        outcome = report.outcomes[rank][case]
        assert "error" not in outcome, outcome["error"]
        assert outcome["value"]["seconds"] < 6 * absent_cases.TIMEOUT_S
        message = outcome["value"]["message"]
        assert "rank 1 did not call attach()" in message or "Ranks 1 failed" in message, message
    _assert_all_gone(report)


def test_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes longer than the time-out, but is alive, is waited for."""
    monkeypatch.setenv("ABSENT_CASE", "slow")
    values = launch("absent_cases", 3, timeout_s=60.0).values("slow")
    assert values[0] == values[1] == values[2]


def test_launch_kills_what_does_not_end() -> None:
    """A hanging suite costs its time-out, not the machine."""
    report = launch("hang_cases", 2, timeout_s=1.0)
    assert report.exit_codes == [None, None]
    with pytest.raises(AssertionError, match="never reported"):
        report.values("hangs")
    _assert_all_gone(report)
