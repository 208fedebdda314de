"""Which compressor wins at which link rate: the same model and machines over a range of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.fusion import ModelProfile
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost
from thinwire.plan.collectives import Backend, Link
from thinwire.plan.network import Network, network_of_link
from thinwire.plan.result import Plan
from thinwire.plan.search import Budget, choose

RATES = tuple(float(rate) * 1e6 for rate in (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 25_000, 100_000))
_QUICK_FUSIONS = ("auto", "16MiB")


def sweep_rates(
    profile: ModelProfile,
    network: Network,
    codecs: Mapping[str, CodecCost],
    cluster: Cluster,
    latency_s: float,
    *,
    rates: Sequence[float] = RATES,
    backend: Backend = "gloo",
    budget: Budget | None = None,
) -> tuple[dict[str, Any], ...]:
    """For each rate (payload bit/s) the winner, the floor and every compressor's predicted step.

    Args:
        network: where the processor time of messages comes from.
    """
    rows = []
    for bits_per_s in rates:
        there = network_of_link(Link(bits_per_s, latency_s), cluster.world_size, backend=backend, cpu=network.cpu)
        plan = choose(profile, there, codecs, cluster, budget=budget, fusions=_QUICK_FUSIONS)
        rows.append(_row(bits_per_s, plan))
    return tuple(rows)


def _row(bits_per_s: float, plan: Plan) -> dict[str, Any]:
    steps = {one.compress: one.step_s for one in plan.candidates}
    return {"bits_per_s": bits_per_s, "winner": plan.compress, "floor_s": plan.floor_s, "step_s": steps}
