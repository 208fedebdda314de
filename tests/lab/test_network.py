"""The links of a lab really limit, count, and can be changed or cut while in use."""

import statistics
import sys
import time
from collections.abc import Callable

import pytest

from thinwire.lab import Lab, lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
TRANSFER_BYTES = 5_000_000
# Both ends of a plain TCP transfer; the receiver prints how long the bytes took to arrive.
TRANSFER = """
import os, socket, sys, time
sender, receiver, address, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == receiver:
    connection, _ = socket.create_server((address, port)).accept()
    start_s, received = time.monotonic(), 0
    while chunk := connection.recv(1 << 16):
        received += len(chunk)
    assert received == size, received
    print(time.monotonic() - start_s)
elif os.environ["RANK"] == sender:
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes(size))
    connection.close()
"""


def transfer_command(lab: Lab, sender: int, receiver: int, size_bytes: int) -> list[str]:
    return [sys.executable, "-c", TRANSFER, str(sender), str(receiver), lab.address(receiver), str(size_bytes)]


def transfer_s(lab: Lab, sender: int, receiver: int, size_bytes: int = TRANSFER_BYTES) -> float:
    lines: list[str] = []
    command = transfer_command(lab, sender, receiver, size_bytes)
    result = lab.run(command, timeout_s=30, on_line=lambda host, line: lines.append(line))
    assert result.ok, lines
    return float(lines[0])


def median_time_factor(slow_s: Callable[[], float], fast_s: Callable[[], float]) -> float:
    """How many times as long the slow one takes; pairs are interleaved because the machine is noisy."""
    return statistics.median(slow_s() / fast_s() for _ in range(3))


@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_each_host_is_limited_to_its_own_rate_in_both_directions(direction: str) -> None:
    with Lab(hosts=3, rates=["50mbit", "200mbit", "unshaped"]) as lab:

        def to_or_from(host: int) -> float:
            return transfer_s(lab, host, 2) if direction == "sending" else transfer_s(lab, 2, host)

        factor = median_time_factor(lambda: to_or_from(0), lambda: to_or_from(1))
    assert 3.0 < factor < 5.5


def test_the_rate_of_all_links_can_be_changed_and_lifted() -> None:
    with Lab(hosts=2, rate="50mbit") as lab:

        def at(rate: str) -> float:
            lab.set_rate(None, rate)
            return transfer_s(lab, 0, 1)

        assert 3.0 < median_time_factor(lambda: at("50mbit"), lambda: at("200mbit")) < 5.5
        assert median_time_factor(lambda: at("50mbit"), lambda: at("unshaped")) > 5.5
        assert lab.rates == (None, None)


def bytes_within(lab: Lab, receiver: int, duration_s: float) -> int:
    before = lab.counters()[receiver].received_bytes
    time.sleep(duration_s)
    return lab.counters()[receiver].received_bytes - before


def wait_for_flow(lab: Lab, receiver: int) -> None:
    """Until the first burst (256 kB pass unshaped) is over."""
    while lab.counters()[receiver].received_bytes < 1_000_000:
        time.sleep(0.01)


def test_a_link_can_be_slowed_while_in_use() -> None:
    with Lab(hosts=2, rate="200mbit") as lab:
        running = lab.start(transfer_command(lab, 0, 1, 200_000_000))
        wait_for_flow(lab, receiver=1)
        fast_bytes = bytes_within(lab, 1, 0.5)
        lab.set_rate(0, "20mbit")
        time.sleep(0.5)  # until TCP has found the new rate
        slow_bytes = bytes_within(lab, 1, 0.5)
        running.terminate()
    assert 0 < slow_bytes < fast_bytes / 3


def test_a_cut_link_carries_nothing_until_it_is_restored() -> None:
    with Lab(hosts=2, rate="200mbit") as lab:
        running = lab.start(transfer_command(lab, 0, 1, 10_000_000))
        wait_for_flow(lab, receiver=1)
        lab.link_down(1)
        assert bytes_within(lab, 1, 0.5) == 0
        assert running.poll() == [None, None]
        lab.link_up(1)
        assert running.wait(timeout_s=30).ok


def test_counters_hold_what_was_sent_and_received() -> None:
    with Lab(hosts=3) as lab:
        result = lab.run(transfer_command(lab, 2, 0, TRANSFER_BYTES), timeout_s=30)
    assert result.sent_bytes is not None
    assert result.received_bytes is not None
    assert TRANSFER_BYTES < result.sent_bytes[2] < 1.1 * TRANSFER_BYTES
    assert TRANSFER_BYTES < result.received_bytes[0] < 1.1 * TRANSFER_BYTES
    assert max(result.sent_bytes[1], result.received_bytes[1]) < 0.01 * TRANSFER_BYTES


def test_a_second_command_counts_its_own_bytes_only() -> None:
    with Lab(hosts=2) as lab:
        lab.run(transfer_command(lab, 0, 1, TRANSFER_BYTES), timeout_s=30)
        result = lab.run(["true"])
    assert result.sent_bytes is not None
    assert result.sent_bytes[0] < 0.01 * TRANSFER_BYTES


def test_hosts_know_each_other_by_name_and_see_no_other_network() -> None:
    lines: list[tuple[int, str]] = []
    script = (
        "import socket, os; print(socket.gethostname(), socket.gethostbyname('host1'), "
        "sorted(os.listdir('/sys/class/net')))"
    )
    with Lab(hosts=2) as lab:
        assert lab.run([sys.executable, "-c", script], on_line=lambda host, line: lines.append((host, line))).ok
        address = lab.address(1)
    assert sorted(lines) == [(host, f"host{host} {address} ['eth0', 'lo']") for host in (0, 1)]


def test_two_labs_at_once_do_not_see_each_other() -> None:
    with Lab(hosts=2) as one, Lab(hosts=2) as other:
        assert one.run(transfer_command(one, 0, 1, TRANSFER_BYTES), timeout_s=30).ok
        assert other.counters()[1].received_bytes < 0.01 * TRANSFER_BYTES
