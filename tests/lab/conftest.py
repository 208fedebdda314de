"""Fixtures of the lab tests: whatever a test does to its lab, no namespace, file or process of it may remain."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from thinwire.lab.reaper import NAMESPACE_DIR, STATE_DIR

OwnerOfLab = Callable[[Sequence[str]], "subprocess.Popen[str]"]
# Tests that run in the background of a script inherit an ignored Ctrl-C; a user's terminal does not ignore it.
_HEED_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
THINWIRE_LAB = [sys.executable, "-c", f"{_HEED_CTRL_C}; from thinwire.cli.lab import app; app()"]


def remains_of(owner: int) -> list[str]:
    """Names of the namespaces and files that belong to labs of this process."""
    folders = [folder for folder in (NAMESPACE_DIR, STATE_DIR) if folder.is_dir()]
    return [path.name for folder in folders for path in folder.iterdir() if path.name.startswith(f"tw{owner}-")]


def processes_with(variable: str, value: str) -> list[int]:
    """Pids of the processes that have this environment variable set to this value."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def reapers_of(owner: int) -> list[int]:
    """Pids of the reapers that watch over labs of this process."""
    lines = {int(folder.name): _command_line(folder) for folder in Path("/proc").glob("[0-9]*")}
    return [pid for pid, line in lines.items() if "reaper.py" in line and f" tw{owner}-" in line]


def _command_line(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until the condition holds; fail with `what` if it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still not so after {timeout_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test starts and ends without a lab of this process."""
    assert remains_of(os.getpid()) == []
    yield
    assert remains_of(os.getpid()) == []


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value in the environment of everything that the test starts, to find its processes by."""
    value = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("LAB_TEST_MARKER", value)
    return value


@pytest.fixture
def all_gone(marker: str) -> Callable[[int], None]:
    """A check that waits until neither a lab of this owner nor a process that the test started is left."""

    def check(owner: int) -> None:
        wait_until(lambda: remains_of(owner) == [], f"no remains of the lab of process {owner}")
        wait_until(lambda: processes_with("LAB_TEST_MARKER", marker) == [], "no process of the test is left")
        wait_until(lambda: reapers_of(owner) == [], f"no reaper of process {owner} is left")

    return check


@pytest.fixture
def lab_command(all_gone: Callable[[int], None]) -> Iterator[OwnerOfLab]:
    """Start `thinwire lab ARGUMENTS`; however it ends, nothing of it may remain."""
    started: list[subprocess.Popen[str]] = []

    def start(arguments: Sequence[str]) -> "subprocess.Popen[str]":
        command = [*THINWIRE_LAB, *arguments]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
        all_gone(process.pid)
