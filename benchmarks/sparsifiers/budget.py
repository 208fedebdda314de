"""Equal bytes: the setting at which a method sends as much as a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import thinwire.api  # noqa: F401  (registers the compressors)
from thinwire.compressors.contrib.varying import VaryingSparsifier
from thinwire.core import Compressor, TensorSpec, Wrapper, available
from thinwire.fusion.groups import make_group
from thinwire.fusion.prepare import prepare

HALVINGS = 24
CALIBRATIONS = 8
CLOSE_ENOUGH = 0.02  # of the budget; what depends on the data is not hit more exactly than that


@dataclass(frozen=True)
class Family:
    """A method with one setting left open.

    Args:
        spec: the text for a setting. A higher setting must not send fewer bytes.
        low: the lowest setting.
        high: the highest one.
    """

    label: str
    spec: Callable[[float], str]
    low: float = 1e-4
    high: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """A method whose setting is found.

    Args:
        wire_bytes: what it says that a rank sends per step, small tensors included.
    """

    label: str
    spec: str
    wire_bytes: int


def wire_bytes(spec: str, tensors: Sequence[TensorSpec], world_size: int) -> int:
    """What one rank sends per step for all these tensors, routed as an attached model routes them."""
    units = make_group(tensors, prepare(spec)).units
    return sum(unit.compressor.wire_bytes(unit.spec, world_size) for unit in units)


def solve(family: Family, tensors: Sequence[TensorSpec], budget_bytes: float, world_size: int) -> Fitted:
    """The setting whose bytes come closest to the budget.

    Ranks, and entries per row, are whole numbers: some methods can only come near it, so look at ``wire_bytes``.
    """

    def fitted(setting: float) -> Fitted:
        spec = family.spec(setting)
        return Fitted(family.label, spec, wire_bytes(spec, tensors, world_size))

    low, high = fitted(family.low), fitted(family.high)
    bounds = family.low, family.high
    for _ in range(HALVINGS if low.wire_bytes < budget_bytes < high.wire_bytes else 0):
        middle = math.sqrt(bounds[0] * bounds[1])
        tried = fitted(middle)
        if tried.wire_bytes <= budget_bytes:
            low, bounds = tried, (middle, bounds[1])
        else:
            high, bounds = tried, (bounds[0], middle)
    return min(low, high, key=lambda one: abs(math.log(one.wire_bytes / budget_bytes)))


def calibrate(
    family: Family,
    tensors: Sequence[TensorSpec],
    budget_bytes: float,
    world_size: int,
    measure: Callable[[str], float],
) -> Fitted:
    """The same for a method whose message depends on the data: its own estimate is corrected by what it really sends.

    Args:
        measure: bytes that a rank sends per step with this spec, on real gradients.
    """
    tried: dict[str, tuple[float, Fitted]] = {}
    target, too_low, too_high = budget_bytes, 0.0, math.inf
    for _ in range(CALIBRATIONS):
        fitted = solve(family, tensors, target, world_size)
        if fitted.spec in tried:
            break
        sent_bytes = measure(fitted.spec)
        error = abs(math.log(sent_bytes / budget_bytes))
        tried[fitted.spec] = error, replace(fitted, wire_bytes=round(sent_bytes))
        if error < CLOSE_ENOUGH:
            break
        if sent_bytes < budget_bytes:
            too_low = max(too_low, target)
        else:
            too_high = min(too_high, target)
        target *= budget_bytes / sent_bytes
        if not too_low < target < too_high:  # what is sent need not be proportional to what was estimated
            target = math.sqrt(too_low * too_high)
    return min(tried.values(), key=lambda one: one[0])[1]


def depends_on_data(spec: str) -> bool:
    """Whether the method decides by the data how much it sends, so that ``wire_bytes`` is a guess."""
    return isinstance(innermost(prepare(spec)), VaryingSparsifier)


def innermost(compressor: Compressor) -> Compressor:
    """What all wrappers are around."""
    return innermost(compressor.inner) if isinstance(compressor, Wrapper) else compressor


def families() -> list[Family]:
    """All methods that are compared; layer selections only where they are registered."""
    registered = {listing.name for listing in available()}
    selections = [_selection(name) for name in ("roundrobin", "normgreedy", "hypernet") if name in registered]
    return [*_FAMILIES, *selections]


def _with_density(label: str, template: str) -> Family:
    return Family(label, lambda density: template.format(f"{density:.4g}"))


def _with_rank(name: str) -> Family:
    return Family(name, lambda rank: f"{name}(rank={round(rank)})", low=1, high=512)


def _selection(name: str) -> Family:
    """No warm-up: it would send more than the budget in the first hundred steps."""
    return _with_density(f"{name}, topk", name + "(budget=0.3, warmup=0) | topk(density={})")


def _dct(density: float) -> str:
    """The longest blocks up to 256, whose positions are one byte; rounded up, or a coefficient would be missing."""
    k = max(1, int(256 * density))
    block = max(2, round(k / density))
    return f"dct(density={math.ceil(1e6 * k / block) / 1e6}, block={block})"


_FAMILIES = (
    _with_density("topk", "topk(density={})"),
    _with_density("randomk", "randomk(density={})"),
    _with_density("adtopk", "adtopk(density={})"),
    _with_density("adtopk, rows only", "adtopk(density={}, interleave=False)"),
    _with_density("bank", "bank(density={})"),
    _with_density("bank, shared", "bank(density={}, mode='shared')"),
    _with_density("mipd", "mipd(density={})"),
    _with_density("mipd, fp32", "mipd(density={}, values='fp32')"),
    _with_density("dgc", "dgc(density={})"),
    _with_density("mstopk", "mstopk(density={})"),
    _with_density("redsync", "redsync(density={})"),
    _with_density("gaussiank", "gaussiank(density={})"),
    _with_density("sidco", "sidco(density={})"),
    _with_density("sidco, gamma", "sidco(density={}, law='gamma')"),
    Family("adacomp", lambda setting: f"adacomp(bin_elems={round(1 / setting)})", low=1e-5),
    Family("dct", _dct, high=0.5),
    _with_density("gtopk", "gtopk(density={})"),
    _with_density("oktopk", "oktopk(density={})"),
    _with_rank("acp"),
    _with_rank("powersgd"),
)
