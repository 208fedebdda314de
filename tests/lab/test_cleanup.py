"""However a run ends, its hosts end with it and the network disappears."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from thinwire.lab import Lab, LabError, clean_leftovers, lab_available
from thinwire.lab.reaper import namespaces_of

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
LabCommand = Callable[[Sequence[str]], "subprocess.Popen[str]"]
AllGone = Callable[[int], None]
# Says that it is up, with a grandchild that left the process group (as torchrun's workers do) and ignores SIGTERM.
STUBBORN = ["sh", "-c", "trap '' TERM; setsid sleep 600 & echo up; sleep 600"]


def test_success_reports_and_leaves_nothing(all_gone: AllGone) -> None:
    with Lab(hosts=2) as lab:
        assert len(namespaces_of(lab.name)) == 3
        result = lab.run(["true"])
    assert result.ok
    assert result.exit_codes == (0, 0)
    all_gone(os.getpid())


def test_a_failing_host_ends_the_others(all_gone: AllGone) -> None:
    with Lab(hosts=3) as lab:
        start_s = time.monotonic()
        result = lab.run(["sh", "-c", 'test "$RANK" = 1 && exit 7; sleep 600'], failure_grace_s=0.2)
        assert time.monotonic() - start_s < 60
    assert result.exit_codes == (-signal.SIGTERM, 7, -signal.SIGTERM)
    assert (result.first_failure, result.ended_by_lab, result.ok) == (1, (0, 2), False)
    all_gone(os.getpid())


def test_the_others_may_finish_within_the_grace_period() -> None:
    with Lab(hosts=2) as lab:
        result = lab.run(["sh", "-c", 'test "$RANK" = 1 && exit 7; sleep 0.5'], failure_grace_s=30)
    assert result.exit_codes == (0, 7)
    assert result.ended_by_lab == ()


def test_a_killed_host_counts_as_failed() -> None:
    with Lab(hosts=2) as lab:
        running = lab.start(["sleep", "600"], failure_grace_s=0.1)
        os.kill(running.pids[1], signal.SIGKILL)
        result = running.wait(timeout_s=30)
    assert result.exit_codes == (-signal.SIGTERM, -signal.SIGKILL)
    assert result.first_failure == 1


def test_a_time_out_ends_every_host_even_stubborn_ones(all_gone: AllGone) -> None:
    with Lab(hosts=2) as lab:
        result = lab.run(STUBBORN, timeout_s=0.5)
        assert result.timed_out
        assert not result.ok
        assert result.exit_codes == (-signal.SIGKILL, -signal.SIGKILL)
        assert lab.run(["true"]).ok  # the lab is still good for another command
    all_gone(os.getpid())


def test_what_a_command_leaves_running_ends_with_it(all_gone: AllGone) -> None:
    with Lab(hosts=1) as lab:
        assert lab.run(["sh", "-c", "sleep 600 & setsid sleep 600 & exit 0"]).ok
        all_gone(-1)  # already now: the next command starts on quiet hosts


def test_an_exception_in_the_block(all_gone: AllGone) -> None:
    def fail_with_hosts_running() -> None:
        with Lab(hosts=2) as lab:
            lab.start(STUBBORN)
            raise KeyError("of the test")

    with pytest.raises(KeyError, match="of the test"):
        fail_with_hosts_running()
    all_gone(os.getpid())


def test_an_exception_of_the_line_callback_is_raised_and_ends_the_run(all_gone: AllGone) -> None:
    def refuse(host: int, line: str) -> None:
        raise OSError("cannot write")

    with Lab(hosts=2) as lab, pytest.raises(OSError, match="cannot write"):
        lab.run(["sh", "-c", "echo up; sleep 600"], on_line=refuse)
    all_gone(os.getpid())


def test_a_failure_while_building_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.network.SHAPING", "burst nonsense")
    with pytest.raises(LabError, match="burst"):
        Lab(hosts=2, rate="10mbit")  # the fixture then finds no namespace


def test_a_closed_lab_says_so() -> None:
    lab = Lab(hosts=1)
    lab.close()
    lab.close()
    with pytest.raises(LabError, match="closed"):
        lab.run(["true"])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_line(lab_command: LabCommand, number: signal.Signals, status: int) -> None:
    process = lab_command(["run", "--hosts", "2", "--", *STUBBORN])
    assert process.stdout is not None
    assert process.stdout.readline().endswith("| up\n")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status  # the fixture then finds nothing left


@pytest.mark.parametrize("emulate", [[], ["--emulate"]])
def test_a_killed_owner(lab_command: LabCommand, emulate: list[str]) -> None:
    """Nobody calls `lab clean`: the reaper sees the owner's pipe close."""
    quiet = ["sh", "-c", "echo up; sleep 600"]
    process = lab_command(["run", "--hosts", "2", *emulate, "--", *(quiet if emulate else STUBBORN)])
    assert process.stdout is not None
    while not process.stdout.readline().endswith("| up\n"):
        assert process.poll() is None
    process.kill()
    process.wait(timeout=30)  # the fixture then waits until nothing is left


# The owner dies the moment its first host's process exists, before it could tell anybody.
KILLED_WHILE_STARTING = """
import os, signal, subprocess
from thinwire.lab import EmulatedLab, Lab

class Fatal(subprocess.Popen):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        if "sleep" in arguments[0]:
            os.kill(os.getpid(), signal.SIGKILL)

lab = {lab}(hosts=1)
subprocess.Popen = Fatal
lab.start(["sleep", "600"])
"""


@pytest.mark.parametrize("lab", ["Lab", "EmulatedLab"])
def test_an_owner_killed_while_it_starts_a_host(lab: str, all_gone: AllGone) -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED_WHILE_STARTING.format(lab=lab)])
    assert owner.wait(timeout=30) == -signal.SIGKILL
    all_gone(owner.pid)


# A lab whose reaper was killed first: only `lab clean` can remove what it leaves.
ORPHAN = """
import os, signal
from thinwire.lab import Lab
lab = Lab(hosts=1)
lab.start(["sleep", "600"])
print(lab.name, flush=True)
os.kill(lab._guard._process.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clean_removes_what_dead_owners_left_and_nothing_else(all_gone: AllGone) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    name = dead.communicate(timeout=30)[0].strip()
    assert namespaces_of(name) == [f"{name}-h0", f"{name}-sw"]
    with Lab(hosts=1) as lab:
        assert set(clean_leftovers()) >= {f"{name}-h0", f"{name}-sw"}
        assert lab.run(["true"]).ok
    all_gone(dead.pid)


CLEAN_ALL = """
import threading
from thinwire.lab import Lab, clean_leftovers
lab = Lab(hosts=1)
up = threading.Event()
running = lab.start(["sh", "-c", "echo up; exec sleep 600"], on_line=lambda host, line: up.set())
assert up.wait(30)
assert lab.name not in " ".join(clean_leftovers())
assert clean_leftovers(all=True) == [f"{lab.name}-h0", f"{lab.name}-sw"]
assert running.poll() == [-9]
"""


def test_clean_all_removes_labs_in_use(tmp_path: Path) -> None:
    """In a mount namespace where no other lab of this machine can be seen."""
    script = tmp_path / "clean_all.py"
    script.write_text(CLEAN_ALL)
    hide_others = "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && exec " + f"'{sys.executable}' '{script}'"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", hide_others], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
