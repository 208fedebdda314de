"""What the planner believes each contestant takes, from the measurements that ``compress="auto"`` chose by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from thinwire.autopilot.measure import codec_costs
from thinwire.core import TensorSpec
from thinwire.demo.settings import Contestant
from thinwire.fusion import Groups
from thinwire.plan import Plan, Pricer

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 1 << 20, 25 << 20  # torch's defaults


def ddp_buckets(tensors: Iterable[TensorSpec]) -> Groups:
    """The buckets of stock DDP, from its second step on: each is closed by the tensor that fills it.

    Args:
        tensors: in the order in which gradients are ready.
    """
    groups: Groups = []
    current: list[TensorSpec] = []
    for tensor in tensors:
        current.append(tensor)
        cap_bytes = DDP_BUCKET_BYTES if groups else DDP_FIRST_BUCKET_BYTES
        if 4 * sum(one.numel for one in current) >= cap_bytes:
            groups.append(tuple(current))
            current = []
    return [*groups, tuple(current)] if current else groups


def with_codecs(pricer: Pricer, specs: Sequence[str]) -> Pricer:
    """The same measurements, with those compressors timed too that the plan did not consider."""
    missing = [spec for spec in specs if spec not in pricer.codecs]
    return replace(pricer, codecs={**pricer.codecs, **codec_costs(missing, pricer.measured.specs)})


def predictions_s(pricer: Pricer, plan: Plan, contestants: Iterable[Contestant]) -> dict[str, float]:
    """By contestant the predicted step, with the fusion that it really uses; torch's hooks get none."""
    predicted: dict[str, float] = {}
    for one in contestants:
        if one.mode == "floor":
            predicted[one.name] = pricer.floor_s
        elif one.mode == "ddp":
            predicted[one.name] = pricer.price_ddp(ddp_buckets(pricer.profile.specs)).step_s
        elif one.mode == "thinwire" and one.compress == "auto":
            predicted[one.name] = plan.step_s
        elif one.mode == "thinwire":
            predicted[one.name] = pricer.price(one.compress, one.fuse).step_s
    return predicted
