"""From tensors to units: routing gives each tensor its compressor, tensors that share one travel as one unit."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, TensorSpec, UnitSpec
from thinwire.wrappers import ErrorFeedback
from thinwire.wrappers.host import OnHost


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors with the compressor they share."""

    spec: UnitSpec
    compressor: Compressor


@dataclass(frozen=True, eq=False)
class Group:
    """Units whose requests are merged into one message per kind and round."""

    units: tuple[Unit, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [tensor for unit in self.units for tensor in unit.spec.tensors]


def make_group(
    tensors: Sequence[TensorSpec],
    compressor: Compressor,
    *,
    whole: Collection[str] = (),
    hosted: Collection[str] = (),
) -> Group:
    """One unit per compressor, in order of first use.

    Args:
        whole: names of tensors that are sent dense although the compressor would do otherwise.
        hosted: names of tensors whose compressor runs on the host.
    """
    shares: dict[Compressor, list[TensorSpec]] = {}
    for tensor in tensors:
        chosen = compressor.route(tensor)
        if tensor.fqn in whole and isinstance(chosen, ErrorFeedback):
            chosen = ErrorFeedback(inner=Dense())  # what waits in its residual goes along
        elif tensor.fqn in hosted:
            chosen = OnHost(inner=chosen)
        shares.setdefault(chosen, []).append(tensor)
    return Group(tuple(Unit(UnitSpec(tuple(members)), chosen) for chosen, members in shares.items()))


def fingerprint(tensors: Sequence[TensorSpec], *settings: str) -> int:
    """64 bits that differ when model or settings differ; carried by every message."""
    model = [f"{t.fqn}{t.shape}{t.dtype}" for t in tensors]
    digest = hashlib.blake2b(repr((model, settings)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
