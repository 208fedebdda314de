"""All ranks send the same entries: their values are averaged like a dense vector, in any value format, without indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.compressors.shared.laplace import LaplaceValues
from thinwire.core import Compressor, ConfigError, Exchange, Exchanged, Step, UnitSpec, memory
from thinwire.core.registry import compressor_class
from thinwire.formats import wire_format

_NAMED = ("bf16", "fp16", "fp8", "int8", "int4", "int2", "int1")
VALUES = ("fp32", *_NAMED)
LAPLACE = ("laplace4", "laplace8")


def check_values(name: str, values: str, known: Sequence[str] = VALUES) -> None:
    """Raise ConfigError unless vectors can be averaged in this format."""
    if values not in known:
        raise ConfigError(f"{name}: values is {values!r}; with a shared mask it is one of {', '.join(known)}")


def averaged(chosen: Tensor, values: str, step: Step) -> Exchange:
    """The mean of a flat vector that has the same length on all ranks, in this value format."""
    unit = UnitSpec.flat(chosen.numel(), step.unit.name)
    return (yield from _averaging(values).exchange(chosen, {}, replace(step, unit=unit, weights=None, importance=None)))


def mean_at(x: Tensor, indices: Tensor, values: str, step: Step) -> Exchange:
    """Average the entries ``indices`` (int64, the same on all ranks) of ``x``, over which the residual is written."""
    done = yield from averaged(x[indices], values, step)
    x[indices] = 0.0 if done.residual is None else done.residual
    mean = memory.zeros(x.numel(), device=x.device)
    mean[indices] = done.mean
    return Exchanged(mean, x, {})


def mean_bytes(count: int, values: str, world_size: int) -> int:
    """What ``averaged`` sends for ``count`` values."""
    return _averaging(values).wire_bytes(UnitSpec.flat(count), world_size)


def bits(values: str) -> int:
    """Bits per value of this format."""
    return int(values.removeprefix("laplace")) if values in LAPLACE else wire_format(values).bits


def _averaging(values: str) -> Compressor:
    if values == "fp32":
        return Dense()
    if values in _NAMED:
        return compressor_class(values)()
    return LaplaceValues(bits=bits(values))
