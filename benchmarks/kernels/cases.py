"""What `thinwire bench kernels` times: for each op the kernel and the plain torch way to the same result."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Coarse, reference

ROW_ELEMS = 1000
_MIN_BANK_ELEMS = 200  # positions inside a bank fit a byte
_PAYLOADS = 4
_INT8_BLOCK, _INT4_BLOCK, _COARSE_BLOCK = 256, 64, 64


@dataclass(frozen=True)
class Unit:
    """The tensors of a case; kernels work in place on `residual`, as training does."""

    grad: Tensor
    residual: Tensor
    offsets: tuple[int, ...]
    density: float

    def bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))


@dataclass(frozen=True)
class Case:
    """One op on one set of tensors; `reset` (untimed) restores what the contestants change."""

    op: str
    numel: int
    density: float
    segments: int
    unit: Unit
    kernel: Callable[[], object]
    plain_torch: Callable[[], object]
    copy: Callable[[], object]
    zero: Callable[[], object]
    reset: Callable[[], object]


Contestants = tuple[Callable[[], object], Callable[[], object]]


def make_case(op: str, numel: int, density: float, segments: int) -> Case:
    """The case of one op; normal gradients and residuals from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    grad, pristine = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    bounds = tuple(numel * segment // segments for segment in range(segments + 1))
    unit = Unit(grad, pristine.clone(), bounds, density)
    kernel, plain_torch = _MAKERS[op](unit)
    target = torch.zeros(numel)
    return Case(
        op=op,
        numel=numel,
        density=density,
        segments=segments,
        unit=unit,
        kernel=kernel,
        plain_torch=plain_torch,
        copy=lambda: target.copy_(grad),
        zero=lambda: target.zero_(),
        reset=lambda: unit.residual.copy_(pristine),
    )


def _threshold_pack(unit: Unit) -> Contestants:
    total = unit.grad + unit.residual
    limits = tuple(
        float(total[a:b].abs().kthvalue(b - a - max(1, round(unit.density * (b - a)))).values) for a, b in unit.bounds()
    )

    def plain_torch() -> None:
        unit.residual.add_(unit.grad)
        for (start, stop), limit in zip(unit.bounds(), limits, strict=True):
            segment = unit.residual[start:stop]
            _take(segment, (segment.abs() > limit).nonzero().squeeze(1))

    return lambda: kernels.ef_threshold_pack(
        unit.grad, unit.residual, unit.offsets, limits, out=unit.residual
    ), plain_torch


def _topk(unit: Unit) -> Contestants:
    ks = tuple(max(1, round(unit.density * (b - a))) for a, b in unit.bounds())

    def plain_torch() -> None:
        unit.residual.add_(unit.grad)
        for (start, stop), k in zip(unit.bounds(), ks, strict=True):
            segment = unit.residual[start:stop]
            _take(segment, segment.abs().topk(k, sorted=False).indices)

    return lambda: kernels.ef_topk(unit.grad, unit.residual, unit.offsets, ks, out=unit.residual), plain_torch


def _row_topk(unit: Unit) -> Contestants:
    k = max(1, round(unit.density * ROW_ELEMS))
    table = _table(unit.residual, ROW_ELEMS)

    def plain_torch() -> None:
        unit.residual.add_(unit.grad)
        indices = table.abs().topk(k, dim=1, sorted=False).indices
        table.gather(1, indices)
        table.scatter_(1, indices, 0.0)

    return lambda: kernels.row_topk(
        unit.grad, unit.residual, unit.offsets, (ROW_ELEMS,), (k,), out=unit.residual
    ), plain_torch


def _bank_topk(unit: Unit) -> Contestants:
    bank_elems = max(_MIN_BANK_ELEMS, round(1 / unit.density))
    k, banks = max(1, round(unit.density * bank_elems)), -(-unit.grad.numel() // bank_elems)
    table = _table(unit.residual, banks)

    def plain_torch() -> None:
        unit.residual.add_(unit.grad)
        indices = table.abs().topk(k, dim=0, sorted=False).indices
        table.gather(0, indices)
        table.scatter_(0, indices, 0.0)

    return lambda: kernels.bank_topk(
        unit.grad, unit.residual, unit.offsets, (banks,), k, out=unit.residual
    ), plain_torch


def _scatter_add(unit: Unit) -> Contestants:
    numel = unit.grad.numel()
    generator = torch.Generator().manual_seed(1)
    payloads = []
    for _ in range(_PAYLOADS):
        drawn = torch.rand(numel, generator=generator).topk(max(1, round(unit.density * numel)), sorted=False).indices
        indices = drawn.sort().values.to(torch.int32)
        payloads.append((torch.randn(len(indices), generator=generator), indices))

    def plain_torch() -> None:
        unit.residual.zero_()
        for values, indices in payloads:
            unit.residual.index_add_(0, indices, values, alpha=1 / _PAYLOADS)

    return lambda: kernels.scatter_mean(payloads, numel, world_size=_PAYLOADS, out=unit.residual), plain_torch


def _int8_encode(unit: Unit) -> Contestants:
    return (
        lambda: kernels.int8_encode(unit.grad, unit.residual, out=unit.residual),
        lambda: reference.int8_encode(unit.grad, unit.residual, _INT8_BLOCK, unit.residual),
    )


def _int8_decode(unit: Unit) -> Contestants:
    coded = kernels.int8_encode(unit.grad, unit.residual)
    return (
        lambda: kernels.int8_decode(coded.codes, coded.scales, unit.grad.numel(), out=unit.residual),
        lambda: reference.int8_decode(coded.codes, coded.scales, _INT8_BLOCK, 1.0, unit.residual, False),
    )


def _int4_encode(unit: Unit) -> Contestants:
    return (
        lambda: kernels.int4_encode(unit.grad, unit.residual, out=unit.residual),
        lambda: reference.int4_encode(unit.grad, unit.residual, _INT4_BLOCK, unit.residual),
    )


def _int4_decode(unit: Unit) -> Contestants:
    coded = kernels.int4_encode(unit.grad, unit.residual)
    return (
        lambda: kernels.int4_decode(coded.codes, coded.scales, unit.grad.numel(), out=unit.residual),
        lambda: reference.int4_decode(coded.codes, coded.scales, _INT4_BLOCK, 1.0, unit.residual, False),
    )


def _coarse_encode(bits: Coarse, unit: Unit) -> Contestants:
    return (
        lambda: kernels.coarse_encode(unit.grad, unit.residual, bits=bits, out=unit.residual),
        lambda: reference.coarse_encode(bits, unit.grad, unit.residual, _COARSE_BLOCK, unit.residual),
    )


def _coarse_decode(bits: Coarse, unit: Unit) -> Contestants:
    coded = kernels.coarse_encode(unit.grad, unit.residual, bits=bits)
    return (
        lambda: kernels.coarse_decode(coded.codes, coded.scales, unit.grad.numel(), bits=bits, out=unit.residual),
        lambda: reference.coarse_decode(bits, coded.codes, coded.scales, _COARSE_BLOCK, 1.0, unit.residual, False),
    )


_MAKERS: dict[str, Callable[[Unit], Contestants]] = {
    "ef_threshold_pack": _threshold_pack,
    "ef_topk": _topk,
    "row_topk": _row_topk,
    "bank_topk": _bank_topk,
    "scatter_add": _scatter_add,
    "int8_encode": _int8_encode,
    "int8_decode": _int8_decode,
    "int4_encode": _int4_encode,
    "int4_decode": _int4_decode,
    "int2_encode": partial(_coarse_encode, 2),
    "int2_decode": partial(_coarse_decode, 2),
    "int1_encode": partial(_coarse_encode, 1),
    "int1_decode": partial(_coarse_decode, 1),
}
OPS = tuple(_MAKERS)


def _table(x: Tensor, columns: int) -> Tensor:
    """The full rows of `x`: plain torch has no way to treat a short last row along with the others."""
    return x[: x.numel() // columns * columns].view(-1, columns)


def _take(segment: Tensor, indices: Tensor) -> Tensor:
    values = segment[indices]
    segment[indices] = 0.0
    return values
