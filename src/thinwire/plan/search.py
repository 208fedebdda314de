"""Choose: price every candidate, drop what costs too much error or memory, and prefer dense unless something wins clearly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from thinwire.compressors.shared.sparse import Sparsifier
from thinwire.core import ConfigError, available, make
from thinwire.core.registry import compressor_class
from thinwire.fusion import Curve, ModelProfile
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost
from thinwire.plan.network import Network
from thinwire.plan.price import DENSE, Price, Pricer, innermost
from thinwire.plan.result import Candidate, Plan, now
from thinwire.plan.result import Quality as Quality
from thinwire.plan.roofline import roofline
from thinwire.plan.roofs import Roofs

EXACT_ERROR = 1e-5  # 16-bit formats lose less, 8-bit ones more
FEW_BIT_ERROR = 0.05  # 4-bit formats with block scales; with error feedback nearly lossless (docs/results/precision.md)
NOISE_QUOTA = 0.1  # an error of a tenth of the gradient noise is lost in it
DENSE_MARGIN = 0.03  # so much faster than dense must it be; more where the probe was noisy,
NOISY_DENSE_MARGIN = 0.05  # but never more than this
TIE_MARGIN = 0.01  # of predictions this close, the smaller error is taken
MESSAGES_MARGIN = 0.05  # so much faster than that of the fewest messages must a fusion of dense be (docs/log.md)
FUSIONS = ("auto", "1MiB", "4MiB", "16MiB", "64MiB", "safusion", "optimal")
OVER_THE_LIMIT = "error over"  # begins the verdict on what loses too much
_MANY_TENSORS = 200  # beyond, the exact fusion planner takes longer than it saves


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a candidate may cost.

    Args:
        quality: the error allowed; ``exact``: 16 bits; ``safe``: few bits, or under the gradient noise; ``fast``: any.
        memory_bytes: for residuals and other state; None: any.
        experimental: also methods whose effect was not shown here yet.
    """

    quality: Quality = "safe"
    memory_bytes: int | None = None
    experimental: bool = False

    def __post_init__(self) -> None:
        if self.quality not in get_args(Quality):
            raise ConfigError(f"quality is {self.quality!r}; expected one of {', '.join(get_args(Quality))}")


def candidate_specs(*, experimental: bool = False) -> list[str]:
    """What is worth pricing: dense first, then the first example of every registered compressor.

    Sparsifiers come a second time, with 8-bit values.
    """
    names = [one.name for one in available() if not one.wrapper and (experimental or one.maturity == "stable")]
    first = [compressor_class(name).examples()[0] for name in names]
    coarser = [replace(one, values="int8") for one in first if isinstance(one, Sparsifier)]
    return list(dict.fromkeys([DENSE, *map(str, [*first, *coarser])]))


def choose(
    profile: ModelProfile,
    network: Network,
    codecs: Mapping[str, CodecCost],
    cluster: Cluster,
    *,
    budget: Budget | None = None,
    fusions: Sequence[str] = FUSIONS,
    roofs: Roofs | None = None,
    facts: Mapping[str, str] | None = None,
    host: Curve | None = None,
    scalars: int = 0,
) -> Plan:
    """The plan for a model on a cluster: a pure function, the same on every rank for the same numbers (but its date).

    Args:
        network: of ``cluster.world_size`` ranks (``network_at``).
        codecs: the candidates, by spec, with what they cost.
        roofs: for the roofline; default: none is drawn.
        facts: what the plan should remember about where its numbers come from.
        host: as of ``Pricer``.
        scalars: as of ``Pricer``.
    """
    budget = budget or Budget()
    pricer = Pricer(profile, network, codecs, cluster, host, scalars)
    best = {spec: best_fusion(pricer, spec, fusions) for spec in codecs if spec == DENSE or _mature(spec, budget)}
    candidates = {spec: _candidate(one, profile, codecs[spec], budget) for spec, one in best.items()}
    margin = min(max(DENSE_MARGIN, network.spread / 3), NOISY_DENSE_MARGIN)
    winner = winner_of(candidates, margin)
    judged = [_judged(one, winner) for one in candidates.values()]
    dense_s = best[DENSE].step_s
    return Plan(
        compress=winner.compress,
        fuse=winner.fuse,
        quality=budget.quality,
        world_size=cluster.world_size,
        step_s=winner.step_s,
        floor_s=pricer.floor_s,
        dense_s=dense_s,
        reasons=tuple(_reasons(winner, best, pricer, margin)),
        candidates=tuple(sorted(judged, key=lambda one: one.step_s)),
        roofline=_rooflines(pricer, best, winner, roofs),
        spans=tuple(best[winner.compress].simulated.spans),
        facts=dict(facts or {}),
        date=now(),
    )


def best_fusion(pricer: Pricer, spec: str, fusions: Sequence[str] = FUSIONS) -> Price:
    """The fastest fusion for a compressor, where every message counts with one start-up more than predicted.

    Ranks reach a message at different times, which no prediction knows: further messages have mostly gained less than
    predicted, and sometimes cost as much (docs/log.md). Dense, which must not be slower than DDP with its few buckets,
    takes the fewest messages unless others are clearly faster.
    """
    many = len(pricer.measured.tensors) > _MANY_TENSORS
    prices = [pricer.price(spec, fuse) for fuse in fusions if not (many and fuse == "optimal")]
    fewest = min(prices, key=lambda one: (one.messages, one.step_s))
    fastest = min(prices, key=lambda one: one.step_s + one.startup_s)
    margin = MESSAGES_MARGIN if spec == DENSE else 0.0
    return fastest if fastest.step_s < (1 - margin) * fewest.step_s else fewest


def _mature(spec: str, budget: Budget) -> bool:
    return budget.experimental or innermost(make(spec)).maturity == "stable"


def _candidate(price: Price, profile: ModelProfile, cost: CodecCost, budget: Budget) -> Candidate:
    measured = profile.error(price.spec)
    error = cost.relative_error if measured is None else measured
    objection = "" if price.spec == DENSE else _objection(price, error, profile, budget)
    return replace(candidate_of(price), relative_error=error, allowed=not objection, verdict=objection)


def candidate_of(price: Price) -> Candidate:
    """What was priced, before it is judged."""
    return Candidate(
        compress=price.spec,
        fuse=price.fuse,
        step_s=price.step_s,
        wire_bytes=price.wire_bytes,
        memory_bytes=price.memory_bytes,
        messages=price.messages,
    )


def _objection(price: Price, error: float, profile: ModelProfile, budget: Budget) -> str:
    """Why a candidate is out; empty if it is not."""
    if budget.memory_bytes is not None and price.memory_bytes > budget.memory_bytes:
        return f"keeps {price.memory_bytes / 1e6:.1f} MB, allowed {budget.memory_bytes / 1e6:.1f} MB"
    limit = error_limit(profile.noise_share(), budget.quality)
    if limit is None or error <= limit:
        return ""
    return f"{OVER_THE_LIMIT} {limit:.0e}"


def error_limit(noise_share: float | None, quality: Quality) -> float | None:
    """The largest ‖g - C(g)‖² / ‖g‖² allowed; None: any.

    Args:
        noise_share: E‖g - G‖² / E‖g‖²; None where it is not known.
    """
    if quality == "fast":
        return None
    if quality == "exact":
        return EXACT_ERROR
    return FEW_BIT_ERROR if noise_share is None else max(FEW_BIT_ERROR, NOISE_QUOTA * noise_share)


def winner_of(candidates: Mapping[str, Candidate], margin: float) -> Candidate:
    """Dense unless something allowed is faster by more than ``margin``; of the fastest the one that loses least."""
    allowed = [one for one in candidates.values() if one.allowed]
    fastest_s = min(one.step_s for one in allowed)
    dense = candidates[DENSE]
    if dense.step_s <= fastest_s * (1 + margin):
        return dense
    ties = [one for one in allowed if one.step_s <= fastest_s * (1 + TIE_MARGIN)]
    return min(ties, key=lambda one: one.relative_error)


def _judged(one: Candidate, winner: Candidate) -> Candidate:
    if one.compress == winner.compress:
        return replace(one, verdict="chosen")
    if not one.allowed:
        return one
    slower = one.step_s / winner.step_s - 1
    if slower > TIE_MARGIN:
        return replace(one, verdict=f"{100 * slower:.0f} % slower")
    return replace(one, verdict="a tie with dense" if winner.compress == DENSE else "a tie, with a larger error")


def _reasons(winner: Candidate, best: Mapping[str, Price], pricer: Pricer, margin: float) -> list[str]:
    dense, chosen = best[DENSE], best[winner.compress]
    reasons = [
        f"The floor, without communication, is {1e3 * pricer.floor_s:.1f} ms; dense adds {_added(dense, pricer)}."
    ]
    if winner.compress == DENSE:
        reasons.append(
            f"Nothing allowed is more than {100 * margin:.0f} % faster, so gradients are best sent as they are."
        )
    else:
        factor = dense.wire_bytes / max(chosen.wire_bytes, 1)
        reasons.append(f"{winner.compress} sends {factor:.1f} × fewer bytes and adds {_added(chosen, pricer)}.")
    if innermost(make(winner.compress)).sparse:
        reasons.append("It sends part of the coordinates in each step: use thinwire.optim with it, not plain Adam.")
    if pricer.cluster.busy_slowdown > pricer.cluster.slowdown:
        reasons.append("Ranks share cores: communication takes processor time from backward, and that is counted.")
    return reasons


def _added(price: Price, pricer: Pricer) -> str:
    added_s = price.step_s - pricer.floor_s
    return f"{1e3 * added_s:.1f} ms, {1e3 * price.simulated.wait_s:.1f} ms of it waiting"


def _rooflines(
    pricer: Pricer, best: Mapping[str, Price], winner: Candidate, roofs: Roofs | None
) -> dict[str, dict[str, Any]]:
    """Of dense and of the winner."""
    if roofs is None:
        return {}
    return {
        spec: roofline(pricer.profile, roofs, best[spec].wire_bytes, _bytes_per_s(best[spec])).to_json()
        for spec in dict.fromkeys((DENSE, winner.compress))
    }


def _bytes_per_s(price: Price) -> float:
    """What the network really carries in messages of this size."""
    busy_s = sum(span.seconds for span in price.simulated.spans if span.activity == "wire")
    return price.wire_bytes / max(busy_s, 1e-12)
