"""``python -m benchmarks.kernels``: each kernel against `copy_` of the same tensor and against the plain torch way."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from benchmarks.kernels.cases import OPS, Case, make_case
from rich.console import Console
from rich.table import Table

from thinwire import kernels

SIZES = (1 << 16, 1 << 20, 1 << 22, 25_600_000)
DENSITIES = (0.1, 0.01, 0.001)
_MANY_SEGMENTS = 200
_MIN_ROUNDS, _MAX_ROUNDS = 7, 200


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """One measured case. Times are medians over the same interleaved rounds."""

    op: str
    numel: int
    density: float  # 1.0 for the dense kernels
    segments: int
    threads: int
    median_s: float
    spread: float  # interquartile range / median
    copy_s: float
    torch_s: float
    zero_s: float  # `zero_` of the same tensor, what scatter_add cannot beat


def run_kernel_bench(
    *,
    sizes: Sequence[int] = SIZES,
    densities: Sequence[float] = DENSITIES,
    ops: Sequence[str] = OPS,
    budget_s: float = 1.0,
    on_result: Callable[[KernelTiming], None] | None = None,
) -> list[KernelTiming]:
    """Time every op at every size and density on one thread, about `budget_s` per case; largest size also segmented."""
    unknown = sorted(set(ops) - set(OPS))
    if unknown:
        raise ValueError(f"ops: got {', '.join(unknown)}, expected some of {', '.join(OPS)}")
    timings = []
    with _one_thread():
        for numel in sizes:
            for op, density, segments in _plan(ops, densities, largest=numel == max(sizes)):
                timings.append(_time(make_case(op, numel, density, segments), budget_s))
                if on_result is not None:
                    on_result(timings[-1])
    return timings


def bench_kernels_command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the timings to this file.")] = None,
    sizes: Annotated[list[int] | None, typer.Option("--size", help="Elements; repeat for several.")] = None,
    densities: Annotated[list[float] | None, typer.Option("--density", help="Fraction kept; repeatable.")] = None,
    ops: Annotated[list[str] | None, typer.Option("--op", help="Kernel to time; repeatable.")] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds per case: more means steadier medians.")] = 1.0,
) -> None:
    """Time the kernels against copy_ and against plain torch, on one thread."""
    console = Console()
    console.print(f"kernels: {kernels.backend()}, torch {torch.__version__}, one thread")
    with console.status("timing") as status:

        def show(timing: KernelTiming) -> None:
            status.update(f"{timing.op} {timing.numel} {timing.density}: {timing.median_s * 1e3:.3f} ms")

        try:
            timings = run_kernel_bench(
                sizes=sizes or SIZES,
                densities=densities or DENSITIES,
                ops=ops or OPS,
                budget_s=budget_s,
                on_result=show,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    console.print(timing_table(timings))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(timing) for timing in timings], indent=1) + "\n")
        console.print(f"wrote {json_file}")


def timing_table(timings: Sequence[KernelTiming]) -> Table:
    """The timings, and as ratios, which is what carries over to other machines."""
    table = Table(
        title="kernels on one thread: medians of interleaved rounds",
        caption="parts: segments; spread: interquartile range / median; / copy_: times as long as a copy; "
        "torch /: times as fast as plain torch",
    )
    for column in ("op", "elements", "density", "parts", "ms", "spread", "/ copy_", "torch /"):
        table.add_column(column, justify="left" if column == "op" else "right", no_wrap=True)
    for timing in timings:
        table.add_row(
            timing.op,
            f"{timing.numel:,}",
            f"{timing.density:g}",
            str(timing.segments),
            f"{timing.median_s * 1e3:.3f}",
            f"{timing.spread:.0%}",
            f"{timing.median_s / timing.copy_s:.2f}",
            f"{timing.torch_s / timing.median_s:.1f}",
        )
    return table


def _plan(ops: Sequence[str], densities: Sequence[float], *, largest: bool) -> Iterator[tuple[str, float, int]]:
    for op in ops:
        dense = op.startswith("int")
        for density in (1.0,) if dense else densities:
            yield op, density, 1
            if largest and op in ("ef_threshold_pack", "ef_topk"):
                yield op, density, _MANY_SEGMENTS


def _time(case: Case, budget_s: float) -> KernelTiming:
    """Interleave the contestants, so that a busy machine slows all of them alike."""
    contestants = (case.kernel, case.copy, case.plain_torch, case.zero)
    start_s = time.perf_counter()
    _round(case, contestants)  # also warms up
    round_s = time.perf_counter() - start_s
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(budget_s / round_s)))
    samples = [_round(case, contestants) for _ in range(rounds)]
    kernel_s, copy_s, torch_s, zero_s = (statistics.median(column) for column in zip(*samples, strict=True))
    low_s, _, high_s = statistics.quantiles([sample[0] for sample in samples], n=4)
    return KernelTiming(
        op=case.op,
        numel=case.numel,
        density=case.density,
        segments=case.segments,
        threads=1,
        median_s=kernel_s,
        spread=(high_s - low_s) / kernel_s,
        copy_s=copy_s,
        torch_s=torch_s,
        zero_s=zero_s,
    )


def _round(case: Case, contestants: Sequence[Callable[[], object]]) -> list[float]:
    seconds = []
    for run in contestants:
        case.reset()
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return seconds


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    typer.run(bench_kernels_command)
