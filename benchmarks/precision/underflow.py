"""Small gradients on an fp16 wire: PyTorch's own hook against thinwire's formats.

    python benchmarks/precision/underflow.py

8, 64 and 512 ranks run in the simulator, with the hook's arithmetic (halve, divide by the world size, add halves) written
out; 4 ranks are real gloo processes, with PyTorch's real ``fp16_compress_hook``. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm import simulate
from thinwire.core import Step, UnitSpec

SIGMA = 1e-6
SPECS = ("fp16", "fp16(scale='agreed')", "bf16", "fp8", "int8")
HOOK = "torch fp16 hook"


@dataclass(frozen=True)
class Row:
    """What came of one way to average the same gradients."""

    ranks: int
    where: str
    wire: str
    sent_zero: float | None  # fraction of what the ranks send; unknown for a real hook
    mean_zero: float
    relative_error: float


def gradient(rank: int, numel: int) -> Tensor:
    """Normal values with the deviation of the specification, different on every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * SIGMA


def row(ranks: int, where: str, wire: str, mean: Tensor, sent_zero: float | None = None) -> Row:
    true = torch.stack([gradient(rank, mean.numel()).double() for rank in range(ranks)]).mean(dim=0)
    error = float((mean.double() - true).norm() / true.norm())
    return Row(ranks, where, wire, sent_zero, float((mean == 0).double().mean()), error)


def hook_arithmetic(ranks: int, numel: int) -> Row:
    """What the hook does, rank by rank, as one process can do it."""
    total, zeros = torch.zeros(numel, dtype=torch.float16), 0
    for rank in range(ranks):
        sent = gradient(rank, numel).half().div_(ranks)
        zeros += int((sent == 0).sum())
        total += sent
    return row(ranks, "simulator", HOOK, total.float(), zeros / (ranks * numel))


def simulated(spec: str, ranks: int, numel: int) -> Row:
    compressor, unit = thinwire.make(spec), UnitSpec.flat(numel)
    exchanges = [
        compressor.exchange(gradient(rank, numel), compressor.init(unit), Step(0, unit, rank, ranks))
        for rank in range(ranks)
    ]
    return row(ranks, "simulator", spec, simulate(exchanges)[0].mean)


class Probe(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // 100, 100))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.view_as(self.weight)).sum()


def gloo_worker(rank: int, ranks: int, numel: int, folder: str) -> None:
    """One of the real processes; rank 0 leaves the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    hooked = DistributedDataParallel(Probe(numel))
    hooked.register_comm_hook(None, fp16_compress_hook)
    hooked(gradient(rank, numel)).backward()
    assert hooked.module.weight.grad is not None
    rows = [row(ranks, "gloo", HOOK, hooked.module.weight.grad.view(-1))]
    for spec in SPECS:
        model = Probe(numel)
        with thinwire.attach(model, compress=spec):
            model(gradient(rank, numel)).backward()
        assert model.weight.grad is not None
        rows.append(row(ranks, "gloo", spec, model.weight.grad.view(-1)))
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps([asdict(each) for each in rows]))
    dist.destroy_process_group()


def on_gloo(ranks: int, numel: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(gloo_worker, (ranks, numel, folder), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        return [Row(**each) for each in json.loads(Path(folder, "rows.json").read_text())]


def show(rows: list[Row]) -> None:
    table = Table(title=f"gradients of σ = {SIGMA:g}", header_style="bold")
    for column in ("ranks", "where", "wire", "sent as zero", "mean is zero", "relative error"):
        table.add_column(column, justify="left" if column in ("where", "wire") else "right")
    for each in rows:
        sent = "" if each.sent_zero is None else f"{each.sent_zero:.1%}"
        table.add_row(
            str(each.ranks), each.where, each.wire, sent, f"{each.mean_zero:.2%}", f"{each.relative_error:.2g}"
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=20_000, help="values per gradient; a multiple of 100")
    parser.add_argument("--out", type=Path, default=Path("runs/precision-underflow.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = on_gloo(4, arguments.numel)
    for ranks in (8, 64, 512):
        rows.append(hook_arithmetic(ranks, arguments.numel))
        rows += [simulated(spec, ranks, arguments.numel) for spec in SPECS]
    show(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
