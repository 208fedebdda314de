"""The emulated lab: same interface, no namespaces, no root."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from thinwire.lab import EmulatedLab, LabError


@pytest.fixture
def lab() -> Iterator[EmulatedLab]:
    with EmulatedLab(hosts=2, rates=["50mbit", "unshaped"]) as built:
        yield built


def output_of(lab: EmulatedLab, script: str, env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    result = lab.run(["sh", "-c", script], env=env, timeout_s=30, on_line=lambda host, line: lines.append((host, line)))
    assert result.ok, lines
    return sorted(lines)


def test_workers_learn_where_they_are(lab: EmulatedLab) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
    variables = " ".join(f"${name}" for name in names.split())
    expected = [(host, f"{host} 2 0 1 127.0.0.1 lo 1") for host in (0, 1)]
    assert output_of(lab, f"echo {variables}") == expected


def test_workers_learn_that_they_must_throttle_themselves(lab: EmulatedLab) -> None:
    lines = output_of(lab, "echo $THINWIRE_LAB_HOST $THINWIRE_LAB_RATE $THINWIRE_LAB_EMULATE")
    assert lines == [(0, "0 50mbit 1"), (1, "1 unshaped 1")]


def test_all_hosts_meet_at_one_port(lab: EmulatedLab) -> None:
    ports = {line for _, line in output_of(lab, "echo $MASTER_PORT")}
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536


def test_the_callers_environment_wins(lab: EmulatedLab) -> None:
    assert output_of(lab, "echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "3"}) == [(0, "3"), (1, "3")]


def test_a_changed_rate_reaches_the_next_command(lab: EmulatedLab) -> None:
    lab.set_rate(1, "1gbit")
    assert output_of(lab, "echo $THINWIRE_LAB_RATE") == [(0, "50mbit"), (1, "1gbit")]


def test_traffic_is_not_counted(lab: EmulatedLab) -> None:
    result = lab.run(["true"])
    assert (lab.counters(), result.sent_bytes, result.received_bytes) == (None, None, None)


def test_there_is_no_link_to_cut(lab: EmulatedLab) -> None:
    with pytest.raises(LabError, match="use Lab"):
        lab.link_down(0)
    with pytest.raises(LabError, match="use Lab"):
        lab.link_up(0)


def test_a_failing_host_ends_the_others(lab: EmulatedLab) -> None:
    result = lab.run(["sh", "-c", 'test "$RANK" = 0 && exit 4; sleep 600'], failure_grace_s=0.1)
    assert result.exit_codes == (4, -signal.SIGTERM)
    assert result.first_failure == 0


def test_lines_arrive_whole_with_bad_bytes_replaced_and_progress_bars_split(lab: EmulatedLab) -> None:
    script = r"printf 'one\rtwo\n\377\nlast'; printf ' and error\n' >&2"
    wanted = ["last and error", "one", "two", "\ufffd"]
    assert output_of(lab, script) == [(host, line) for host in (0, 1) for line in wanted]


def test_closing_ends_what_still_runs() -> None:
    lab = EmulatedLab(hosts=2)
    running = lab.start(["sleep", "600"])
    lab.close()
    assert running.poll() == [-signal.SIGTERM] * 2
    assert running.wait().ended_by_lab == (0, 1)


def test_the_reaper_goes_when_the_lab_is_closed() -> None:
    lab = EmulatedLab(hosts=1)
    reaper = lab._guard._process
    assert reaper.poll() is None
    lab.close()
    assert reaper.returncode == 0


def test_wrong_commands_and_hosts_are_refused(lab: EmulatedLab) -> None:
    with pytest.raises(ValueError, match="'no-such-program' was not found"):
        lab.run(["no-such-program"])
    with pytest.raises(ValueError, match="empty command"):
        lab.run([])
    with pytest.raises(ValueError, match="hosts 0 to 1"):
        lab.address(2)
    with pytest.raises(ValueError, match="hosts 0 to 1"):
        lab.set_rate(-1, "1mbit")


def test_the_lab_package_itself_needs_no_torch(lab: EmulatedLab) -> None:
    package = os.path.dirname(sys.modules["thinwire.lab"].__file__ or "")
    sources = [os.path.join(package, name) for name in os.listdir(package) if name.endswith(".py")]
    assert len(sources) > 5
    for source in sources:
        with open(source, encoding="utf-8") as text:
            assert "import torch" not in text.read(), source
