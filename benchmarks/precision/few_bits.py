"""Formats of few bits side by side: relative error on three laws, and processor time to encode and decode.

    python benchmarks/precision/few_bits.py --elems 4194304

The error is ||x - C(x)|| / ||x||, without feedback. Times are medians of one thread: encode adds a residual and writes the
new one, as training does (``stk`` has a pass before it for that). A dense copy is what memory allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.stk import SignTopK
from thinwire.formats import WireFormat, wire_format
from thinwire.kernels.rows import row_bytes

FORMATS = ("int8", "int4", "int2", "int1")
STK_DENSITIES = (0.05, 0.01)
REPEATS = 15


def laws(elems: int) -> dict[str, Tensor]:
    """Values as gradients may be distributed; Student's t with three degrees of freedom has the heaviest tails."""
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(elems, generator=generator)
    laplace = torch.empty(elems).exponential_(generator=generator).copysign_(torch.randn(elems, generator=generator))
    chi = torch.randn(3, elems, generator=generator).square().mean(dim=0)
    return {"Gauss": gauss, "Laplace": laplace, "Student t3": gauss / chi.sqrt()}


def ns_per_element(work: Callable[[], object], elems: int) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        began_ns = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - began_ns)
    return statistics.median(times) / elems


def format_row(name: str, samples: dict[str, Tensor]) -> list[str]:
    fmt, x = wire_format(name), samples["Gauss"]
    assert fmt.by_rows is not None
    errors = [float(fmt.encode(one.clone()).residual.norm() / one.norm()) for one in samples.values()]
    return [name, f"{8 * fmt.message_bytes(x.numel()) / x.numel():.3f}", *map(_percent, errors), *_times(fmt, x)]


def _times(fmt: WireFormat, x: Tensor) -> list[str]:
    bits = fmt.by_rows
    assert bits is not None
    messages = torch.zeros(1, row_bytes(bits, x.numel(), fmt.block), dtype=torch.uint8)
    residual, out = torch.zeros_like(x), torch.empty_like(x)
    encode = ns_per_element(
        lambda: kernels.encode_rows(x, residual, messages, bits=bits, block=fmt.block, out=out), x.numel()
    )
    decode = ns_per_element(lambda: kernels.decode_rows(messages, out, bits=bits, block=fmt.block), x.numel())
    return [f"{encode:.2f}", f"{decode:.2f}"]


def stk_row(density: float, samples: dict[str, Tensor]) -> list[str]:
    x = samples["Gauss"]
    chunks = SignTopK(density=density).chunks(x.numel(), 1)
    errors = [float(chunks.encode(one.clone(), 0, None).residual.norm() / one.norm()) for one in samples.values()]
    message = chunks.write(x.clone(), 0, 1, None).headroom[0, 40:]
    out = torch.empty_like(x)
    encode = ns_per_element(lambda: chunks.write(x.clone(), 0, 1, None), x.numel())
    decode = ns_per_element(lambda: chunks.decode(message, 0, 1.0, out, False), x.numel())
    bits = 8 * message.numel() / x.numel()
    return [f"stk({density=})", f"{bits:.3f}", *map(_percent, errors), f"{encode:.2f}", f"{decode:.2f}"]


def _percent(error: float) -> str:
    return f"{100 * error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elems", type=int, default=1 << 20)
    elems = parser.parse_args().elems
    torch.set_num_threads(1)
    samples = laws(elems)
    table = Table(title=f"{elems} values, {kernels.backend()}: relative error in %, processor time in ns per value")
    for column in ("format", "bits", *samples, "encode", "decode"):
        table.add_column(column, justify="right" if column != "format" else "left")
    for name in FORMATS:
        table.add_row(*format_row(name, samples))
    for density in STK_DENSITIES:
        table.add_row(*stk_row(density, samples))
    x, out = samples["Gauss"], torch.empty(elems)
    table.add_row("dense copy", "32", *["0.0"] * 3, f"{ns_per_element(lambda: out.copy_(x), elems):.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
