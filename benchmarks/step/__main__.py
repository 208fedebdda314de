"""``python -m benchmarks.step``: step times of compressors on the lab network, against the floor and stock DDP."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from benchmarks.step.interleaved import Turns

    from thinwire.demo.settings import Contestant, Workload
    from thinwire.lab import BaseLab

DEFAULT_COMPRESSORS = ("dense", "bf16", "int8", "int4", "topk(density=0.01)", "powersgd(rank=4)")
WORKER = "benchmarks.step.interleaved"


@dataclass(frozen=True)
class Cell:
    """One contestant at one rate."""

    contestant: str
    rate: str
    median_step_s: float
    low_step_s: float
    high_step_s: float
    times_floor: float
    wait_s: float | None  # of all ranks; also for each other, where they share cores
    network_wait_s: float | None  # of the last rank in each step, which waits for nobody else
    sent_bytes: float
    turns: int


def bench_step_command(
    rates: Annotated[str, typer.Option(help="Link rates, separated by commas; 'unshaped' for no limit.")] = "200mbit",
    compress: Annotated[
        list[str] | None, typer.Option(help="A compressor; give it again for more. (default: a selection)")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="One of every registered compressor.")] = False,
    fuse: Annotated[list[str] | None, typer.Option(help="How to fuse; give it again for more. (default: auto)")] = None,
    model: Annotated[str, typer.Option(help="A GPT: tiny, small or medium; or cnn or lstm.")] = "small",
    seq: Annotated[int, typer.Option(help="Bytes per window.", min=32)] = 128,
    batch: Annotated[int, typer.Option(help="Windows per host and step.", min=1)] = 7,
    hosts: Annotated[int, typer.Option(help="Number of hosts.", min=2)] = 4,
    rounds: Annotated[int, typer.Option(help="Turns of every contestant.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Steps per turn.", min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Time training steps on shaped links: the floor, stock DDP and each compressor take turns in one job.

    Times are medians over turns (the mean step of a turn, from barrier to barrier), with the first and last decile. Needs
    root (network namespaces).
    """
    from thinwire.demo.settings import Workload
    from thinwire.lab import Lab, LabError

    console = Console()
    specs = _all_specs() if everything else list(compress or DEFAULT_COMPRESSORS)
    cells: list[Cell] = []
    try:
        with Lab(hosts) as lab:
            for rate in rates.split(","):
                lab.set_rate(None, rate)
                turns = _turns(
                    Workload(model=model, seq=seq, batch=batch), specs, fuse or ["auto"], rate, rounds, steps
                )
                cells += _measure(console, lab, turns, rate)
    except KeyboardInterrupt:
        console.print("[yellow]Stopped. What was measured so far follows.[/]")
    except (LabError, ValueError) as error:
        console.print(Text(str(error), style="red"))
        raise typer.Exit(2) from error
    _show(console, cells)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n", encoding="utf-8")


def _all_specs() -> list[str]:
    import thinwire
    from thinwire.core.registry import compressor_class

    names = [listing.name for listing in thinwire.available() if not listing.wrapper]
    return [str(compressor_class(name).examples()[0]) for name in names]


def _turns(workload: Workload, specs: list[str], fuse: list[str], rate: str, rounds: int, steps: int) -> Turns:
    from benchmarks.step.interleaved import Turns

    import thinwire
    from thinwire.demo.settings import Contestant
    from thinwire.lab import parse_rate

    def contestant(name: str, mode: str, spec: str = "auto", how: str = "auto") -> Contestant:
        return Contestant(
            name=name,
            label=name,
            mode=mode,  # type: ignore[arg-type]
            workload=workload,
            compress=spec,
            fuse=how,
            bits_per_s=parse_rate(rate),
        )

    for spec in specs:
        thinwire.make(spec) if spec != "auto" else None
    ours = [
        contestant(f"thinwire {spec}" + (f", {how}" if len(fuse) > 1 else ""), "thinwire", spec, how)
        for spec in specs
        for how in fuse
    ]
    everybody = (contestant("floor", "floor"), contestant("stock DDP", "ddp"), *ours)
    return Turns(contestants=everybody, rounds=rounds, steps_per_turn=steps)


def _measure(console: Console, lab: BaseLab, turns: Turns, rate: str) -> list[Cell]:
    from benchmarks.step.interleaved import warmup_steps

    from thinwire.demo.fairness import KEEP_FREED_MEMORY
    from thinwire.observe.events import parse_event, read_events

    total = sum(turns.rounds * turns.steps_per_turn + warmup_steps(one) for one in turns.contestants)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        settings = Path(folder) / "settings.json"
        turns.save(settings)
        task = progress.add_task(rate, total=total)
        said: list[str] = []

        def on_line(host: int, line: str) -> None:
            event = parse_event(line) if host == 0 else None
            if event is not None:
                progress.advance(task, event["kind"] == "step")
            else:
                said.append(f"[host {host}] {line}")

        result = lab.run([sys.executable, "-m", WORKER, str(settings)], env=KEEP_FREED_MEMORY, on_line=on_line)
        if not result.ok:
            raise ValueError("a worker failed; it last said:\n" + "\n".join(said[-15:]))
        events = [event for path in Path(folder).glob("rank*.jsonl") for event in read_events(path)]
    return _cells(turns, [event for event in events if not event["warmup"]], rate)


def _cells(turns: Turns, events: list[dict[str, object]], rate: str) -> list[Cell]:
    from thinwire.observe.summary import deciles

    def values(name: str, field: str, kind: str = "step") -> list[float]:
        chosen = (e for e in events if e["kind"] == kind and e["contestant"] == name and field in e)
        return [float(e[field]) for e in chosen]  # type: ignore[arg-type]

    floor_s = statistics.median(values("floor", "step_s", "turn"))
    cells = []
    for contestant in turns.contestants:
        seconds = values(contestant.name, "step_s", "turn")
        waits, network_waits = values(contestant.name, "wait_s"), _network_waits_s(events, contestant.name)
        low_s, high_s = deciles(seconds)
        median_s = statistics.median(seconds)
        cells.append(
            Cell(
                contestant=contestant.name,
                rate=rate,
                median_step_s=median_s,
                low_step_s=low_s or median_s,
                high_step_s=high_s or median_s,
                times_floor=median_s / floor_s,
                wait_s=statistics.median(waits) if waits else None,
                network_wait_s=statistics.median(network_waits) if network_waits else None,
                sent_bytes=statistics.fmean(values(contestant.name, "sent_bytes")),
                turns=len(seconds),
            )
        )
    return cells


def _network_waits_s(events: list[dict[str, object]], contestant: str) -> list[float]:
    """For each step the shortest wait of any rank: the last one to end its backward waits for the network alone.

    The others also wait for that rank, which on shared cores says more about the cores than about the network.
    """
    waits: dict[object, list[float]] = {}
    for event in events:
        if event["kind"] == "step" and event["contestant"] == contestant and "wait_s" in event:
            waits.setdefault(event["step"], []).append(float(event["wait_s"]))  # type: ignore[arg-type]
    return [min(of_ranks) for of_ranks in waits.values()]


def _show(console: Console, cells: list[Cell]) -> None:
    table = Table(title="step times", title_justify="left")
    for column in ("rate", "contestant", "step, median (p10-p90)", "× floor", "wait", "network wait", "MB per host"):
        table.add_column(column, justify="left" if column in ("rate", "contestant") else "right")
    for cell in cells:
        table.add_row(
            cell.rate,
            cell.contestant,
            f"{cell.median_step_s:.3f} s ({cell.low_step_s:.2f}-{cell.high_step_s:.2f})",
            f"{cell.times_floor:.2f}",
            *("" if wait_s is None else f"{wait_s:.3f} s" for wait_s in (cell.wait_s, cell.network_wait_s)),
            f"{cell.sent_bytes / 1e6:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(bench_step_command)
