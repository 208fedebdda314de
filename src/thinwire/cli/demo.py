"""``thinwire demo``: train a GPT over a slow network three times and compare."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from thinwire.cli.mistakes import between, check_outputs
from thinwire.lab.rates import MAX_HOSTS, parse_rate

if TYPE_CHECKING:
    from thinwire.demo.contest import Network
    from thinwire.demo.settings import Contestant, Workload

BUSY_SHARE = 0.5  # of the cores, over the last minute
STOPPED_STATUS = 130  # as a shell reports Ctrl-C


def demo(
    model: Annotated[str, typer.Option(help="Size of the GPT: tiny (0.9 M), small (5 M) or medium (20 M).")] = "small",
    hosts: Annotated[int, typer.Option(help="Number of hosts.", callback=between(2, MAX_HOSTS))] = 4,
    rate: Annotated[str, typer.Option(help="Rate of every host's link, such as 200mbit.")] = "200mbit",
    compress: Annotated[
        list[str] | None, typer.Option(help="What thinwire uses; give it again for more contestants. (default: auto)")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of every contestant. (default: 45; 24 with --quick)", callback=between(1))
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows per host and step. (default: 7)", callback=between(1))
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes per window. (default: 128)", callback=between(1))] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the data.", callback=between(0, 2**63 - 1))
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to write. (default: runs/<time>-demo)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: under a minute on two cores.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="No namespaces, no root: throttle thinwire itself.")
    ] = False,
) -> None:
    """Train a byte-level GPT on Python's own source over a slow network: with no communication, dense, with thinwire.

    Prints a table, and writes an HTML report and the events of all hosts.
    """
    from thinwire.demo.contest import Network, line_up
    from thinwire.demo.settings import make_workload

    console = Console()
    specs = compress or ["auto"]
    _check_names(model, specs)
    workload = make_workload(quick=quick, model=model, seed=seed, steps=steps, batch=batch, seq=seq)
    directory = _fresh_directory(out)
    parse_rate(rate)  # before it is said what the network is like
    network = Network(hosts=hosts, rate=rate, emulated=_must_emulate(console, emulate))
    contestants = line_up(workload, network, specs)
    _introduce(console, workload, network)
    _warn_if_busy(console)
    raise typer.Exit(_run(console, contestants, network, directory))


def _check_names(model: str, specs: list[str]) -> None:
    """Find misspelt names now rather than in the workers, after two runs."""
    import thinwire
    from thinwire.demo.model import check_size

    check_size(model)
    for spec in specs:
        if spec != "auto":
            thinwire.make(spec)


def _fresh_directory(asked: Path | None) -> Path:
    """Where this run writes; never among the events of another."""
    directory = asked or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-demo"
    check_outputs({}, folders={"--out": directory})
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"--out is {directory}, which is not empty; choose another, or remove it first")
    return directory


def _must_emulate(console: Console, asked: bool) -> bool:
    from thinwire.lab import lab_available

    available, reason = lab_available()
    if not asked and not available:
        console.print(Text(f"Falling back to --emulate: {reason}", style="yellow"))
    if asked or not available:
        console.print(
            "[yellow]EMULATED:[/] hosts are processes on loopback and only thinwire's own transport is throttled. "
            "Stock DDP cannot be, so the dense contestant is thinwire's dense exchange; bytes are thinwire's own count."
        )
    return asked or not available


def _introduce(console: Console, workload: Workload, network: Network) -> None:
    text = (
        f"A byte-level GPT ({workload.model}) learns Python's standard library on [bold]{network.describe()}[/].\n"
        f"Every contestant: {workload.steps} steps of {workload.batch} × {workload.seq} bytes per host, the same seed, "
        "weights and data.\n"
        "The floor exchanges nothing: no method can be faster, and its loss is of no interest."
    )
    console.print(Panel(text, title="thinwire demo", border_style="cyan"))


def _warn_if_busy(console: Console) -> None:
    """What else runs meanwhile slows some turns and not others."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_SHARE * cores:
        console.print(f"[yellow]This machine is busy (load {load:.1f} on {cores} cores): times will be noisy.[/]")


def _run(console: Console, contestants: list[Contestant], network: Network, directory: Path) -> int:
    """Run the contest, close with table and report (also when it was stopped or failed), return the exit status."""
    from thinwire.demo.contest import WorkerFailed, run_contest
    from thinwire.demo.live import LiveView
    from thinwire.lab import LabError

    status = 0
    try:
        with LiveView(console) as view:
            run_contest(contestants, network, directory, view)
    except KeyboardInterrupt:
        console.print("[yellow]Stopped. What was measured so far is kept.[/]")
        status = STOPPED_STATUS
    except (WorkerFailed, LabError) as error:
        console.print(Text(str(error), style="red"))
        status = 1
    _close(console, directory)
    return status


def _close(console: Console, directory: Path) -> None:
    """Show what was measured, if anything was."""
    from thinwire.cli.report import print_contest
    from thinwire.observe.events import EventError
    from thinwire.observe.html.page import write_html
    from thinwire.observe.runs import load_contests

    try:
        contests = load_contests([directory])
    except EventError:
        return  # stopped before the first worker had started: nothing to show
    for contest in contests:
        print_contest(console, contest)
    report = directory / "report.html"
    write_html(contests, report)
    console.print(f"Report: {report}\nEvents: {directory}", highlight=False, soft_wrap=True)
