"""Planning while training: from the times of a few real steps to a plan. Pure functions; the engine measures and agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core import TensorSpec
from thinwire.fusion import ModelProfile, Noise
from thinwire.plan.price import DENSE, Pricer
from thinwire.plan.probe import SAME_NETWORK
from thinwire.plan.result import Candidate, Plan, now
from thinwire.plan.search import Quality, candidate_of, candidate_specs

# Only optimizers that know how old updates are may get a sparsifier; this one is measured in docs/results/optimizers.md.
FAST_SPECS = ("topk(density=0.05, score='update') | fp16",)
_LARGEST_CORRECTION = 2.0  # beyond, noise is more likely than a fault of the model
# Fusions that need no profile of their own: no planner that measures was faster in docs/results/fusion.md.
AUTO_FUSIONS = ("auto", "1MiB", "4MiB", "16MiB", "64MiB")


@dataclass(frozen=True)
class StepTimes:
    """One step on one rank.

    Args:
        before_s: from the end of the step before to the first gradient: optimizer, data, forward.
        ready_s: when each gradient was ready, after the first one.
        step_s: until the last gradient was averaged.
    """

    before_s: float
    ready_s: Mapping[str, float]
    step_s: float

    @property
    def backward_s(self) -> float:
        """From the first gradient to the last."""
        return max(self.ready_s.values(), default=0.0)

    @property
    def compute_s(self) -> float:
        """Everything but communication."""
        return self.before_s + self.backward_s


def auto_specs(quality: Quality, *, reads_ages: bool) -> list[str]:
    """What ``compress="auto"`` chooses from: dense, the stable formats, and a sparsifier where it is asked for and safe.

    Not fp16: bf16 sends as many bytes, takes less time and needs no scale.
    """
    formats = [spec for spec in candidate_specs() if spec != "fp16"]
    return [*formats, *(FAST_SPECS if quality == "fast" and reads_ages else ())]


def ready_times(tensors: Sequence[TensorSpec], steps: Sequence[StepTimes]) -> Tensor:
    """When each gradient was ready after the beginning of its step: one row per step, one column per tensor.

    A gradient that did not come is as late as the last one that did.
    """
    return torch.tensor([[step.before_s + step.ready_s.get(t.fqn, step.backward_s) for t in tensors] for step in steps])


def profile_of_steps(tensors: Sequence[TensorSpec], ready_s: Tensor, slowdown: float) -> ModelProfile:
    """The model as the pricer wants it.

    Args:
        ready_s: as ``ready_times`` gives it, of steps without communication next to them. Nothing can be sent before all
            ranks have it, so these are the times of the last rank. Where ranks share cores that is not the same one for
            all gradients, and no rank alone shows it: some compute first, and others only then.
        slowdown: of the cluster (``Cluster.slowdown``), which is in the times already.
    """
    usual_s = ready_s.quantile(0.5, dim=0).tolist()
    forward_s = min(usual_s)  # with the optimizer: it lies between two steps, before the first gradient
    return ModelProfile.in_ready_order(
        {tensor: at_s - forward_s for tensor, at_s in zip(tensors, usual_s, strict=True)},
        forward_s=forward_s,
        backward_s=max(usual_s) - forward_s,
        slowdown=slowdown,
    )


def noise_over_ranks(of_ranks: Sequence[Mapping[str, float]], mean_sq: Mapping[str, float]) -> dict[str, Noise]:
    """Signal and noise of a rank's gradient, from the squared norms of the ranks' gradients and of their mean.

    With P ranks whose gradients g have the signal S and the noise N, E‖g‖² = S + N and E‖mean g‖² = S + N/P.

    Args:
        of_ranks: at least two, each by parameter name, summed over the same steps as ``mean_sq``.
    """
    ranks = len(of_ranks)
    noise = {}
    for name, of_mean in mean_sq.items():
        of_one = sum(local_sq[name] for local_sq in of_ranks) / ranks
        noise_sq = max(0.0, (of_one - of_mean) * ranks / (ranks - 1))
        noise[name] = Noise(max(0.0, of_one - noise_sq), noise_sq)
    return noise


def expectations(plan: Plan, in_use: str, observed_s: float) -> tuple[float, float]:
    """What a step will take under the plan, and what it takes or would take dense, given what it takes now.

    The prediction of what is in use is known to be off by some factor; the communication that others add to the floor is
    corrected by the same. What is observed needs no prediction.
    """
    predicted_s = {one.compress: one.step_s for one in plan.candidates}.get(in_use, observed_s)
    factor = (observed_s - plan.floor_s) / max(predicted_s - plan.floor_s, 1e-9)
    factor = min(max(factor, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)

    def expected_s(compress: str, step_s: float) -> float:
        return observed_s if compress == in_use else plan.floor_s + factor * (step_s - plan.floor_s)

    return expected_s(plan.compress, plan.step_s), expected_s(DENSE, plan.dense_s)


def alone(compute_s: float, quality: Quality) -> Plan:
    """The plan of a single rank."""
    return Plan(
        compress=DENSE,
        fuse="auto",
        quality=quality,
        world_size=1,
        step_s=compute_s,
        floor_s=compute_s,
        dense_s=compute_s,
        reasons=("There is one rank, and nobody to send anything to.",),
        candidates=(Candidate(compress=DENSE, fuse="auto", step_s=compute_s),),
        date=now(),
    )


def only_one(pricer: Pricer, compress: str, fuse: str, quality: Quality) -> Plan:
    """The plan where compressor and fusion are given, and only the groups are to be found."""
    price, dense = pricer.price(compress, fuse), pricer.price(DENSE, "auto")
    return Plan(
        compress=compress,
        fuse=fuse,
        quality=quality,
        world_size=pricer.cluster.world_size,
        step_s=price.step_s,
        floor_s=pricer.floor_s,
        dense_s=dense.step_s,
        reasons=("Compressor and fusion were given.",),
        candidates=(candidate_of(price),),
        date=now(),
    )


def lost(before: Plan, again: Plan) -> bool:
    """Whether a choice that was slower than dense is made again on the network on which it was.

    Args:
        before: the plan whose trial steps took longer than dense did.
        again: the one made after it, from new measurements.
    """
    same_network = abs(again.dense_s / before.dense_s - 1) <= SAME_NETWORK
    return same_network and again.compress == before.compress


def back_to_dense(plan: Plan, observed_s: float, dense_s: float) -> Plan:
    """The plan after its choice was measured to be slower than dense."""
    dense, tried = (next(one for one in plan.candidates if one.compress == c) for c in (DENSE, plan.compress))
    verdicts = {plan.compress: "measured, and slower than dense", DENSE: "chosen"}
    reason = f"{plan.compress} took {1e3 * observed_s:.1f} ms, dense {1e3 * dense_s:.1f} ms: back to dense."
    candidates = [
        replace(one, verdict=verdicts.get(one.compress, one.verdict), allowed=one.allowed and one is not tried)
        for one in plan.candidates
    ]
    return plan.changed_to(dense, reason, candidates)


def summary(plan: Plan) -> str:
    """One line: what, and why."""
    times = f"{plan.step_s:.4g} s predicted, dense {plan.dense_s:.4g} s, floor {plan.floor_s:.4g} s"
    why = plan.reasons[1:] or plan.reasons  # the first one repeats the times
    return f"{plan.compress}, fuse={plan.fuse}: {times}. {' '.join(why)}"
