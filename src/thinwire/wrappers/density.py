"""The density of a sparsifier inside wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from thinwire.core import Compressor, ConfigError, Schedule, Wrapper


def with_density(compressor: Compressor, density: float) -> Compressor:
    """The same compressor at another density."""
    if isinstance(compressor, Wrapper):
        return replace(compressor, inner=with_density(compressor.inner, density))
    return replace(compressor, density=density)  # type: ignore[type-var]


def has_density(compressor: Compressor) -> bool:
    """Whether the innermost compressor has a density to set."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.inner
    return any(field.name == "density" for field in fields(compressor))  # type: ignore[arg-type]


def check_has_density(name: str, inner: Compressor) -> None:
    """Raise ConfigError unless there is a density to set."""
    if not has_density(inner):
        raise ConfigError(f"{name} sets densities and {inner} has none; write '{name} | topk', for example")


def check_fractions(name: str, **densities: float) -> None:
    """Raise ConfigError unless all are densities, at every step."""
    for argument, value in densities.items():
        bounds: Sequence[float] = value.bounds if isinstance(value, Schedule) else (value,)
        if not all(0 < bound <= 1 for bound in bounds):
            raise ConfigError(
                f"{name}: {argument} is {value}; expected a density above 0 and at most 1, for example 0.01"
            )
