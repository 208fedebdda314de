"""``thinwire probe``: measure collectives, compressors and roofs of a cluster, and keep the result."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from thinwire.cli.mistakes import between, check_outputs
from thinwire.lab.rates import MAX_HOSTS

if TYPE_CHECKING:
    from thinwire.lab import BaseLab
    from thinwire.plan import Probe
    from thinwire.plan.worker import Settings

_TIMEOUT_S = 600.0
_SHOWN_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def probe(
    hosts: Annotated[
        int | None,
        typer.Option(
            help="Ranks to start here. (default: 2; under torchrun: its ranks)", callback=between(2, MAX_HOSTS)
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Put the ranks on a lab network of this rate, such as 200mbit (needs root).")
    ] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="With --rate: throttle instead, without root.")] = False,
    largest: Annotated[
        int,
        typer.Option(
            help="Megabytes of the largest message; the size of the model's gradients.", callback=between(1, 65_536)
        ),
    ] = 64,
    everything: Annotated[bool, typer.Option("--all", help="Also time experimental compressors.")] = False,
    compress: Annotated[list[str] | None, typer.Option(help="Also time this compressor; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write. (default: the cache, by cluster)")] = None,
) -> None:
    """Measure what planning needs to know about a cluster: seconds by bytes of each collective, seconds by elements of each
    compressor, and what a rank computes and copies per second.

    Under torchrun it probes the ranks of that job, else processes on this machine, with --rate on a lab network. The
    result is kept for `thinwire plan`.
    """
    console = Console()
    check_outputs({"--out": out, "the cache": cache_folder() / "probe.json" if out is None else None})
    result = _measure(console, hosts, rate, emulate, largest, _specs(everything, compress or []), out)
    if result is not None:
        show(console, *result)


def cache_folder() -> Path:
    """Where probes are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "thinwire"


def _specs(everything: bool, more: list[str]) -> list[str]:
    import thinwire.api  # noqa: F401  (fills the registry)
    from thinwire.core import make
    from thinwire.plan import candidate_specs

    return list(dict.fromkeys([*candidate_specs(experimental=everything), *(str(make(spec)) for spec in more)]))


def _measure(
    console: Console,
    hosts: int | None,
    rate: str | None,
    emulate: bool,
    largest: int,
    specs: list[str],
    out: Path | None,
) -> tuple[Probe, Path] | None:
    from thinwire.lab import parse_rate
    from thinwire.plan.worker import Settings

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            out=str(Path(folder) / "probe.json"),
            specs=specs,
            largest_bytes=largest << 20,
            cores=os.cpu_count() or 1,
            throttle_bits_per_s=parse_rate(rate) if rate is not None and emulate else None,
            facts={"link": rate or "as it is"},
        )
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if hosts is not None or rate is not None:
                raise ValueError(
                    "under torchrun the ranks and the network are there already; leave --hosts and --rate out"
                )
            return _under_torchrun(console, settings, out)
        return _on_this_machine(console, settings, hosts or 2, rate, emulate, out)


def _under_torchrun(console: Console, settings: Settings, out: Path | None) -> tuple[Probe, Path] | None:
    """Every rank runs this; only rank 0 shows and keeps anything."""
    from thinwire.plan.worker import run

    first = os.environ["RANK"] == "0"
    with _progress(console if first else Console(quiet=True), settings) as advance:
        probe = run(settings, advance)
    return None if probe is None else (probe, _keep(probe, out))


def _on_this_machine(
    console: Console, settings: Settings, hosts: int, rate: str | None, emulate: bool, out: Path | None
) -> tuple[Probe, Path]:
    from thinwire.lab import EmulatedLab, Lab
    from thinwire.plan import Probe

    shaped = rate is not None and not emulate
    with Lab(hosts, rate) if shaped else EmulatedLab(hosts) as lab:
        _run_workers(console, lab, settings)
    probe = Probe.load(Path(settings.out))
    return probe, _keep(probe, out)


def _run_workers(console: Console, lab: BaseLab, settings: Settings) -> None:
    path = Path(settings.out).with_name("settings.json")
    settings.save(path)
    said: list[str] = []
    with _progress(console, settings) as advance:

        def on_line(host: int, line: str) -> None:
            if line.startswith("probed "):
                advance(line.removeprefix("probed "))
            else:
                said.append(f"[host {host}] {line}")

        result = lab.run(
            [sys.executable, "-m", "thinwire.plan.worker", str(path)], on_line=on_line, timeout_s=_TIMEOUT_S
        )
    if not result.ok:
        raise ValueError("a rank failed; it last said:\n" + "\n".join(said[-15:]))


def _keep(probe: Probe, out: Path | None) -> Path:
    from thinwire.plan.store import keep

    if out is None:
        return keep(probe, cache_folder())
    probe.save(out)
    return out


class _Advance:
    """Moves a progress bar by one measurement and shows which."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("starting", total=total)

    def __call__(self, done: str) -> None:
        self._progress.update(self._task, advance=1, description=done)


@contextmanager
def _progress(console: Console, settings: Settings) -> Iterator[_Advance]:
    from thinwire.plan.probe import planned_sizes

    columns = (TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Advance(progress, planned_sizes(settings.largest_bytes) + len(settings.specs))


def show(console: Console, probe: Probe, path: Path) -> None:
    """Print what was measured."""
    cluster = probe.cluster
    console.print(
        f"{cluster.world_size} ranks ({cluster.ranks_per_machine} per machine of {cluster.cores} cores), {probe.date}, "
        f"spread {100 * probe.network.spread:.0f} %, {probe.roofs.flops_per_s / 1e9:.1f} GFLOP/s, "
        f"{probe.roofs.memory_bytes_per_s / 1e9:.1f} GB/s",
        highlight=False,
    )
    console.print(_network_table(probe))
    if probe.network.burst_s > 0:
        saved_ms = 1e3 * probe.network.burst_s
        console.print(f"After a rest messages are up to {saved_ms:.1f} ms shorter: a shaper lets a burst pass.")
    console.print(_codec_table(probe))
    console.print(f"Probe: {path}", highlight=False, soft_wrap=True)


def _network_table(probe: Probe) -> Table:
    table = Table(title="Collectives: ms (ms of processor time) by bytes sent by one rank", title_justify="left")
    table.add_column("collective")
    for size in _SHOWN_BYTES:
        table.add_column(f"{size >> 10} KiB", justify="right")
    for kind in probe.network.wire:
        times = [(probe.network.message_s(kind, size), probe.network.cpu_s(kind, size)) for size in _SHOWN_BYTES]
        table.add_row(kind, *(f"{1e3 * wire_s:.2f} ({1e3 * cpu_s:.2f})" for wire_s, cpu_s in times))
    return table


def _codec_table(probe: Probe) -> Table:
    table = Table(title="Compressors: ms per million elements", title_justify="left")
    table.add_column("compressor")
    for heading in ("before the first message", "after it", "rounds", "error"):
        table.add_column(heading, justify="right")
    for spec, cost in probe.codecs.items():
        first_s, *later_s = cost.stage_s(1e6, probe.cluster.world_size)
        row = (f"{1e3 * first_s:.2f}", f"{1e3 * sum(later_s):.2f}", str(len(cost.rounds)), f"{cost.relative_error:.1e}")
        table.add_row(Text(spec), *row)
    return table
