"""`thinwire lab`: prefixes, the closing table, exit statuses, and errors that say what to do."""

import io
import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from thinwire.cli.lab import HostPrinter, app, closing_table, exit_status
from thinwire.lab import LabResult, lab_available


@pytest.fixture(autouse=True)
def _ask_the_machine_again() -> Iterator[None]:
    lab_available.cache_clear()
    yield
    lab_available.cache_clear()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def result_with(**changes: object) -> LabResult:
    values: dict[str, object] = {
        "exit_codes": (0, 0),
        "sent_bytes": (3_000_000, 10),
        "received_bytes": (10, 3_000_000),
        "duration_s": 2.0,
        "first_failure": None,
        "ended_by_lab": (),
        "timed_out": False,
    }
    return LabResult(**{**values, **changes})  # type: ignore[arg-type]


def rendered(result: LabResult) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(closing_table(result, (200_000_000, None)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_keep_their_brackets_and_carry_the_host() -> None:
    console = Console(file=io.StringIO(), width=30, highlight=False)
    printer = HostPrinter(console, hosts=11)
    printer(3, "[red]not markup[/red] [/] " + "x" * 40)
    printer(10, "")
    assert isinstance(console.file, io.StringIO)
    expected = "host3  | [red]not markup[/red] [/] " + "x" * 40 + "\nhost10 | \n"
    assert console.file.getvalue() == expected


def test_colours_of_the_host_do_not_reach_a_file() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    HostPrinter(console, hosts=1)(0, "\x1b[31mred\x1b[0m")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "host0 | red\n"


def test_the_closing_table_has_bytes_and_rates() -> None:
    text = rendered(result_with())
    host0 = next(line for line in text.splitlines() if "host0" in line)
    assert [cell.strip() for cell in host0.strip("│").split("│")] == [
        "host0", "200mbit", "0", "3,000,000", "10", "1.50", "0.00",
    ]  # fmt: skip


def test_the_closing_table_says_who_ended_a_host_and_what_was_not_counted() -> None:
    text = rendered(result_with(exit_codes=(7, -15), ended_by_lab=(1,), sent_bytes=None, received_bytes=None))
    assert "SIGTERM (by the lab)" in text
    assert "not counted" in text


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (result_with(), 0),
        (result_with(exit_codes=(-15, 7), first_failure=1, ended_by_lab=(0,)), 7),
        (result_with(exit_codes=(-9, -15), first_failure=0, ended_by_lab=(1,)), 137),
        (result_with(exit_codes=(-15, -15), ended_by_lab=(0, 1), timed_out=True), 124),
        (result_with(exit_codes=(-15, -15), ended_by_lab=(0, 1)), 1),
    ],
)
def test_exit_status(result: LabResult, status: int) -> None:
    assert exit_status(result) == status


def test_an_emulated_run_says_so_and_prefixes_lines() -> None:
    done = invoke("run", "--hosts", "2", "--rate", "1gbit", "--emulate", "--", "sh", "-c", "echo I am $RANK")
    assert done.exit_code == 0
    assert "EMULATED" in done.output
    assert "only traffic through thinwire's own transport is throttled" in " ".join(done.output.split())
    assert {"host0 | I am 0", "host1 | I am 1"} <= set(done.output.splitlines())


def test_the_status_of_the_failing_host_is_passed_on() -> None:
    assert invoke("run", "--emulate", "--hosts", "2", "--", "sh", "-c", "exit $((RANK * 5))").exit_code == 5


def test_a_time_out_is_status_124() -> None:
    done = invoke("run", "--emulate", "--hosts", "1", "--timeout", "0.2", "--", "sleep", "600")
    assert done.exit_code == 124
    assert "time-out of 0.2 s" in done.output


def test_options_of_the_command_are_left_to_it() -> None:
    done = invoke(
        "run", "--emulate", "--hosts", "1", sys.executable, "-c", "import sys; print(sys.argv)", "--rate", "x"
    )
    assert "host0 | ['-c', '--rate', 'x']" in done.output


def test_the_number_of_hosts_follows_the_rates() -> None:
    done = invoke("run", "--emulate", "--rates", "1mbit,2mbit,none", "--", "sh", "-c", "echo $THINWIRE_LAB_RATE")
    assert {"host0 | 1mbit", "host1 | 2mbit", "host2 | unshaped"} <= set(done.output.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "--", "true"], "such as 200mbit"),
        (["--hosts", "3", "--rates", "1mbit,2mbit", "--", "true"], "got 2 rates for 3 hosts"),
        (["--rate", "1mbit", "--rates", "1mbit,2mbit", "--", "true"], "give one of them"),
        (["--hosts", "0", "--", "true"], "got 0, expected 1 to 200"),
        (["--emulate", "--", "no-such-program"], "'no-such-program' was not found"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    done = invoke("run", *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_without_root_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = invoke("run", "--", "true")
    assert done.exit_code == 2
    assert "needs root" in done.output
    assert "--emulate" in done.output


def test_without_iproute2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_which = shutil.which
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else real_which("sh"))
    done = invoke("run", "--", "true")
    assert done.exit_code == 2
    assert "`tc`" in done.output
    assert "iproute2" in done.output
    assert "--emulate" in done.output


def test_clean_names_what_it_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.cli.lab.clean_leftovers", lambda *, all: ["tw1-0-h0"] if all else [])
    assert invoke("clean").output == "nothing to clean\n"
    assert invoke("clean", "--all").output == "removed tw1-0-h0\n"
