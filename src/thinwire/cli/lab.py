"""`thinwire lab`: run a command on a cluster of network namespaces, and clean up after killed labs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, NoReturn, final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.cli.mistakes import Commands, between
from thinwire.lab import BaseLab, EmulatedLab, Lab, LabResult, clean_leftovers, format_rate
from thinwire.lab.emulated import EMULATION_NOTICE
from thinwire.lab.rates import MAX_HOSTS

app = typer.Typer(cls=Commands, help="A cluster on one machine: hosts in network namespaces, joined by shaped links.")

_DEFAULT_HOSTS = 4
_TIMED_OUT_STATUS = 124  # as timeout(1)
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@final
class HostPrinter:
    """Prints the hosts' lines, each whole and behind its host's name; what a host writes is never taken for markup."""

    def __init__(self, console: Console, hosts: int) -> None:
        self._console = console
        self._width = len(f"host{hosts - 1}")
        self._lock = threading.Lock()  # the hosts' lines come from one thread each

    def __call__(self, host: int, line: str) -> None:
        """Print one line of one host."""
        prefix = Text(f"{f'host{host}':<{self._width}} | ", style=_STYLES[host % len(_STYLES)])
        with self._lock:
            self._console.print(prefix.append_text(Text.from_ansi(line)), soft_wrap=True)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What to run on each host, after --.", metavar="CMD...")],
    hosts: Annotated[
        int | None,
        typer.Option(help="Number of hosts (default: 4, or as many as --rates).", callback=between(1, MAX_HOSTS)),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rate of every link, such as 200mbit or 1gbit (default: unshaped).")
    ] = None,
    rates: Annotated[str | None, typer.Option(help="One rate per host instead: 200mbit,50mbit,unshaped,...")] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="No namespaces, no root: only thinwire's own transport is throttled.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="End the run after this many seconds.", callback=between(0.001))
    ] = None,
) -> None:
    """Run CMD once per host of a small cluster, as torchrun would have started it.

    Each host sees MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK,
    GLOO_SOCKET_IFNAME, THINWIRE_LAB_HOST and THINWIRE_LAB_RATE. A table with
    the bytes that really went over each link closes the run.

    The exit status is that of the first host that failed (the others are then
    ended), or 124 if --timeout was reached.

    Example: thinwire lab run --hosts 4 --rate 200mbit -- python train.py
    """
    console = Console(highlight=False)
    try:
        rate_list = None if rates is None else rates.split(",")
        default_hosts = _DEFAULT_HOSTS if rate_list is None else len(rate_list)
        count = default_hosts if hosts is None else hosts
        with _sigterm_as_exit(), (EmulatedLab if emulate else Lab)(count, rate, rate_list) as lab:
            result = _run_in(lab, command, timeout, console)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; all hosts were ended and the network removed", style="yellow")
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(exit_status(result))


@app.command()
def clean(
    all: Annotated[bool, typer.Option("--all", help="Also labs that are in use, with every process in them.")] = False,
) -> None:
    """Remove what killed labs left behind: the namespaces whose owner is dead."""
    removed = clean_leftovers(all=all)
    console = Console(highlight=False)
    for namespace in removed:
        console.print(f"removed {namespace}")
    if not removed:
        console.print("nothing to clean")


def _run_in(lab: BaseLab, command: list[str], timeout_s: float | None, console: Console) -> LabResult:
    if isinstance(lab, EmulatedLab):
        console.print(EMULATION_NOTICE, style="yellow", markup=False)
    result = lab.run(command, timeout_s=timeout_s, on_line=HostPrinter(console, lab.hosts))
    if result.timed_out:
        console.print(f"ended after the time-out of {timeout_s:g} s", style="red")
    console.print(closing_table(result, lab.rates))
    return result


def closing_table(result: LabResult, rates: tuple[int | None, ...]) -> Table:
    """Return the table with each host's exit and traffic."""
    table = Table(title=f"{len(result.exit_codes)} hosts, {result.duration_s:.2f} s", title_justify="left")
    table.add_column("host")
    for heading in ("rate", "exit", "sent bytes", "received bytes", "sent MB/s", "received MB/s"):
        table.add_column(heading, justify="right")
    for host, code in enumerate(result.exit_codes):
        exit_text = Text(_describe_exit(host, code, result), style="red" if code else "green")
        table.add_row(f"host{host}", format_rate(rates[host]), exit_text, *_describe_traffic(host, result))
    return table


def exit_status(result: LabResult) -> int:
    """Return what `lab run` exits with: 0, 124 for a time-out, else the status of the first host that failed."""
    if result.ok:
        return 0
    if result.timed_out:
        return _TIMED_OUT_STATUS
    code = 1 if result.first_failure is None else result.exit_codes[result.first_failure]
    return code if code > 0 else 128 - code


def _describe_exit(host: int, code: int, result: LabResult) -> str:
    text = signal.Signals(-code).name if code < 0 else str(code)
    return f"{text} (by the lab)" if host in result.ended_by_lab else text


def _describe_traffic(host: int, result: LabResult) -> list[str]:
    if result.sent_bytes is None or result.received_bytes is None:
        return ["not counted"] * 2 + ["-"] * 2
    traffic_bytes = (result.sent_bytes[host], result.received_bytes[host])
    return [f"{count:,}" for count in traffic_bytes] + [
        f"{count / result.duration_s / 1e6:.2f}" for count in traffic_bytes
    ]


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the lab closes in order instead of leaving it to the reaper."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
