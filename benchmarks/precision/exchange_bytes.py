"""Bytes on the wire, by interface counters: few-bit exchanges against a ring all-reduce of bf16 values.

    python benchmarks/precision/exchange_bytes.py        (root: it builds a lab of network namespaces)

Four hosts average the same gradient several times over unshaped links; what their interfaces counted is compared. Prints a
table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.demo.contender import INTERFACE_TABLE, interface_sent_bytes
from thinwire.lab import Lab

HOSTS = 4
RING = "bf16 ring all-reduce"
WIRES = (RING, "bf16", "fp16", "fp8", "int8", "int4", "float4", "best4")
SIDE = 1500  # of the square matrix that is exchanged


def worker(steps: int) -> None:
    """One host: average with each wire in turn; rank 0 prints what its interface counted, as JSON."""
    import torch
    import torch.distributed as dist

    import thinwire

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradient = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(dist.get_rank()))
    counted = {}
    for wire in WIRES:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(SIDE, SIDE))
        with nullcontext() if wire == RING else thinwire.attach(model, compress=wire):
            dist.barrier()
            before = interface_sent_bytes(INTERFACE_TABLE.read_text())
            for _ in range(steps):
                if wire == RING:
                    dist.all_reduce(gradient.to(torch.bfloat16))
                else:
                    (model.weight * gradient).sum().backward()
            dist.barrier()
            counted[wire] = (interface_sent_bytes(INTERFACE_TABLE.read_text()) - before) / steps
    if dist.get_rank() == 0:
        print(json.dumps(counted))
    dist.destroy_process_group()


def measure(steps: int) -> dict[str, float]:
    """Bytes that a host sends per step, by wire."""
    lines: list[str] = []
    with Lab(HOSTS) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--steps", str(steps)]
        result = lab.run(command, timeout_s=150, on_line=lambda host, line: lines.append(line))
    found = [line for line in lines if line.startswith("{")]
    if not result.ok or not found:
        raise RuntimeError(f"the workers failed with exit codes {result.exit_codes}: {lines[-5:]}")
    bytes_of: dict[str, float] = json.loads(found[0])
    return bytes_of


def show(bytes_of: dict[str, float]) -> None:
    table = Table(title=f"{SIDE} × {SIDE} gradient, {HOSTS} hosts, interface counters", header_style="bold")
    table.add_column("wire")
    for column in ("MB per host and step", "of a bf16 ring", "bits per value"):
        table.add_column(column, justify="right")
    for wire, sent in bytes_of.items():
        bits = sent * 8 / (2 * (HOSTS - 1) / HOSTS * SIDE**2)
        table.add_row(wire, f"{sent / 1e6:.2f}", f"{sent / bytes_of[RING]:.3f}", f"{bits:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="used by the script itself, on each host")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/precision-bytes.json"))
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.steps)
        return
    bytes_of = measure(arguments.steps)
    show(bytes_of)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(bytes_of, indent=2) + "\n")


if __name__ == "__main__":
    main()
