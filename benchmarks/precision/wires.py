"""Few-bit wires at 200 Mbit/s on four hosts: step times and evaluation losses beside bf16 and dense.

    python benchmarks/precision/wires.py        (root: it builds a lab of network namespaces)

The demo's byte GPT, the same seed, weights and data for all. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.demo.contest import Network, line_up, run_contest
from thinwire.demo.settings import Contestant, Workload
from thinwire.observe.events import Event, parse_event

SPECS = ("bf16", "fp16", "fp8", "int8", "int4", "float4", "flint4", "best4")
WARMUP_STEPS = 3


class Progress:
    """Says which contestant is running."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def started(self, contestant: Contestant) -> None:
        self._console.print(f"[dim]{contestant.label}[/]")

    def event(self, contestant: Contestant, event: Event) -> None:
        """Nothing: the files are read at the end."""


def result_of(directory: Path, contestant: Contestant) -> dict[str, Any]:
    """What rank 0 wrote, in a few numbers."""
    lines = (directory / contestant.name / "rank0.jsonl").read_text().splitlines()
    events = [event for event in map(parse_event, lines) if event is not None]
    steps = [event for event in events if event["kind"] == "step"][WARMUP_STEPS:]
    losses = [event["loss"] for event in events if event["kind"] == "eval"]
    return {
        "wire": contestant.label.removeprefix("thinwire "),
        "step_s": statistics.median(event["step_s"] for event in steps),
        "sent_bytes": statistics.median(event["sent_bytes"] for event in steps),
        "evaluation_losses": losses,
    }


def show(results: list[dict[str, Any]], title: str) -> None:
    dense = next(each for each in results if each["wire"] == "dense DDP")
    table = Table(title=title, header_style="bold")
    table.add_column("wire")
    for column in ("step", "of dense", "MB per step", "evaluation loss", "against dense"):
        table.add_column(column, justify="right")
    for each in results:
        loss = each["evaluation_losses"][-1]
        table.add_row(
            each["wire"],
            f"{each['step_s']:.3f} s",
            f"{each['step_s'] / dense['step_s']:.2f}",
            f"{each['sent_bytes'] / 1e6:.2f}",
            f"{loss:.4f}",
            f"{loss / dense['evaluation_losses'][-1] - 1:+.2%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="small")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--wires", nargs="+", default=list(SPECS))
    parser.add_argument("--out", type=Path, default=Path("runs/precision-wires.json"))
    arguments = parser.parse_args()
    workload = Workload(model=arguments.model, steps=arguments.steps)
    network = Network(hosts=4, rate=arguments.rate)
    contestants = line_up(workload, network, arguments.wires)
    with tempfile.TemporaryDirectory() as folder:
        run_contest(contestants, network, Path(folder), Progress(Console()))
        results = [result_of(Path(folder), contestant) for contestant in contestants]
    show(results, f"GPT {arguments.model}, {network.describe()}, {arguments.steps} steps")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
