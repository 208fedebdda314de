"""``compress="auto"``: measure while training, plan, change over, and go on watching. Runs between steps, never in backward.

Steps of a first plan: a few to warm up, a few whose time is what dense takes, then *isolated* ones, whose groups wait for the
end of backward so that it is timed alone. Then all ranks measure the network together, rank 0 times the compressors and
chooses, and all take over its plan at the same step. Later rank 0 compares the steps with the prediction. That it has timed
enough, or that steps drift, travels as a scalar with the flags of every step, so all ranks hear of it at the same step. All
ranks keep the same statistics of what compression loses, and leave a compressor that loses too much.

A fusion that needs a profile (``fuse="safusion"``) is the same with one candidate.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median
from typing import Literal

from torch import Tensor

from thinwire.autopilot.active_plan import ActivePlan, read_active_plan
from thinwire.autopilot.clock import StepClock
from thinwire.autopilot.errors import ErrorStatistics
from thinwire.autopilot.expect import (
    StepTimes,
    alone,
    back_to_dense,
    expectations,
    lost,
    noise_over_ranks,
    only_one,
    profile_of_steps,
    ready_times,
    summary,
)
from thinwire.autopilot.measure import cluster_of, codec_costs, gradient_errors, link_network, still_holds
from thinwire.autopilot.quality import MODEL, measured, requalified
from thinwire.autopilot.watch import Verdict, Watch
from thinwire.comm.objects import all_gather_object, all_reduce_max, barrier, broadcast_object
from thinwire.engine.base import Gradients
from thinwire.fusion import Curve, Noise, parse_fusion
from thinwire.fusion.groups import GroupPlan, plan_groups
from thinwire.fusion.prepare import prepare
from thinwire.fusion.profile import WARMUP_STEPS
from thinwire.plan.cluster import Cluster, machine_id
from thinwire.plan.host import host_curve
from thinwire.plan.network import Network
from thinwire.plan.price import DENSE, Pricer
from thinwire.plan.result import Plan
from thinwire.plan.search import Budget, Quality, choose

log = logging.getLogger(__name__)

SIGNAL = "signal"  # the scalar by which rank 0 says that a phase ends or that steps drift
TIMED_S = 3.0  # steps of both kinds are timed until they make up this: short ones are noisy, long ones hold training up
FEWEST_DENSE_STEPS, DENSE_STEPS = 2, 4
FEWEST_ISOLATED_STEPS, ISOLATED_STEPS = 4, 12
REGROUPING_STEPS = 8  # isolated ones, where only groups are planned
PLANNING_STEPS = WARMUP_STEPS + DENSE_STEPS + ISOLATED_STEPS  # the first plan is made after so many at most

Phase = Literal["dense", "isolated", "watch"]


def planned_after(dense_s: float, compute_s: float) -> int:
    """After how many steps the first plan is made, where they take ``dense_s``, ``compute_s`` of it without communication."""
    dense = _steps_to_time(dense_s, FEWEST_DENSE_STEPS, DENSE_STEPS)
    return WARMUP_STEPS + dense + _steps_to_time(compute_s, FEWEST_ISOLATED_STEPS, ISOLATED_STEPS)


def _steps_to_time(step_s: float, fewest: int, most: int) -> int:
    return max(fewest, ceil(min(most, TIMED_S / max(step_s, 1e-9))))


@dataclass(frozen=True, kw_only=True)
class AutoSettings:
    """What the user allows.

    Args:
        specs: the candidates, dense among them.
        fusions: the candidates' fusions.
        start: compressor and fusion of the first steps.
        fixed: the compressor is the user's choice; only groups are planned.
    """

    quality: Quality
    specs: Sequence[str]
    fusions: Sequence[str]
    start: tuple[str, str]
    fixed: bool = False


class Autopilot:
    """Steers the gradients of a model: which compressor and which groups, from one step to the next."""

    def __init__(self, gradients: Gradients, settings: AutoSettings) -> None:
        self._gradients, self._settings = gradients, settings
        self._channel, self._link = gradients.channel, gradients.channel.members.link()
        self._tensors = list(self._channel.tensors.values())
        self._clock = StepClock(is_cpu=self._link.device.type == "cpu")
        self.active: ActivePlan | None = None
        self.pricer: Pricer | None = None  # rank 0's: what the newest plan was made from, to ask about other settings
        self._start()

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first one is made."""
        return None if self.active is None else self.active.plan

    def between_steps(self, signals: Sequence[float]) -> None:
        """Take in the step that has just ended. All ranks call it at the same point of their program.

        Args:
            signals: the scalar ``SIGNAL`` of every rank.
        """
        began_s, report = time.perf_counter(), self._gradients.last
        assert report is not None
        self._advance(self._clock.read(report, gradients=self._channel.isolated), signalled=any(signals))
        if self._channel.isolated:
            barrier(self._link)  # ranks may share cores: the end of this step must not slow down the next
        self._clock.resume(report, time.perf_counter() - began_s)

    def load(self, active: ActivePlan | None) -> None:
        """Go on with a plan from a checkpoint, or measure again where there was none yet; states are not touched.

        Args:
            active: what ``saved`` gave, as ``read_active_plan`` has read and checked it.
        """
        self._start()
        if active is not None:
            self._follow(replace(active, ledger=None), trial=False)
            if active.ledger is not None:
                self.errors.ledger.load_json(active.ledger)

    def saved(self) -> str | None:
        """The plan in force with its ledger, for checkpoints."""
        if self.active is None:
            return None
        return replace(self.active, ledger=self.errors.ledger.to_json()).to_text()

    def describe(self) -> str:
        """One line for people."""
        if self.plan is None:
            start = self._settings.start[0]
            return f"auto: {start} while measuring; a plan is made after step {PLANNING_STEPS} at the latest"
        return f"auto: {summary(self.plan)}"

    def _start(self) -> None:
        self.active, self._watch = None, Watch(0.0, float("inf"))
        self._dense_s = 0.0  # a step of the start setting, before the first plan
        self._network: Network | None = None  # as it was last measured; the same on all ranks
        self._verdict: Verdict = "fine"
        self.errors = ErrorStatistics(self._channel)
        self._local_sq: Counter[str] = Counter()  # over the isolated steps of the first plan
        self._mean_sq: Counter[str] = Counter()
        self._noise: dict[str, Noise] = {}  # of rank 0's first plan, which measures these for all later ones
        self._errors: dict[str, dict[str, float]] = {}
        self._enter("dense")

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._say(False)
        self._times: list[StepTimes] = []
        self._channel.measure(isolated=phase == "isolated", norms=phase == "isolated" and self.active is None)
        if phase == "watch":
            self.errors.open_step()

    def _say(self, signal: bool) -> None:
        """What this rank tells the others with the next step."""
        self._gradients.scalars = {SIGNAL: float(signal)}

    def _advance(self, times: StepTimes, *, signalled: bool) -> None:
        if self._phase == "watch":
            if signalled:
                self._reconsider()
            else:
                self._observe(times)
                self._keep_statistics()
            return
        self._times.append(times)
        timed = self._times if self._phase == "isolated" else self._times[WARMUP_STEPS:]
        if self._phase == "isolated":
            assert self._gradients.last is not None
            self._local_sq.update(self._gradients.last.local_sq)
            self._mean_sq.update(self._gradients.last.mean_sq)
            if signalled:
                self._make_plan()
            else:
                most = REGROUPING_STEPS if self._settings.fixed else ISOLATED_STEPS
                self._time_enough([one.compute_s for one in timed], FEWEST_ISOLATED_STEPS, most)
        elif signalled:
            self._dense_s = self._clock.usual_s(timed)
            self._enter("isolated")
        elif len(self._times) >= WARMUP_STEPS:
            fewest, most = (1, 1) if self._settings.fixed else (FEWEST_DENSE_STEPS, DENSE_STEPS)
            self._time_enough([one.step_s for one in timed], fewest, most)

    def _time_enough(self, timed_s: Sequence[float], fewest: int, most: int) -> None:
        """Rank 0 says beforehand that the next step is the last one of its phase."""
        enough = len(timed_s) + 1 >= _steps_to_time(fmean(timed_s or [0.0]), fewest, most)
        self._say(self._link.rank == 0 and enough)

    def _observe(self, times: StepTimes) -> None:
        """Rank 0 alone, and only if there is a network that can drift."""
        if self._link.rank != 0 or self._link.world_size == 1:
            return
        assert self.active is not None
        self._verdict = self._watch.add(self._clock.step_s(times, self.active.before_s))
        self._say(self._verdict != "fine")

    def _keep_statistics(self) -> None:
        """Change over if what is in use loses too much, or what was refused does no longer."""
        assert self.active is not None
        assert self._gradients.last is not None
        recorded = self.errors.close_step(self._gradients.last)
        self.errors.open_step()
        if not recorded:
            return
        found, plan = measured(self.errors.ledger, self._link.world_size), self.active.plan
        self._report_errors(None if found is None else (found.error, found.noise_share))
        changed = plan if found is None or self._settings.fixed else requalified(plan, found)
        if changed is not plan:
            expected_s, dense_s = expectations(changed, plan.compress, self.active.expected_s)
            self._change(replace(self.active, plan=changed, expected_s=expected_s, dense_s=dense_s))

    def _report_errors(self, found: tuple[float | None, float] | None) -> None:
        ledger = self.errors.ledger
        worst = ledger.worst("compression")
        error, noise_share = found or (None, None)
        fields = {
            "step": self._channel.index - 1,
            "noise": ledger.relative(MODEL, "noise"),
            "compression": ledger.relative(MODEL, "compression"),
            "worst_unit": None if worst is None else worst[0],
            "worst_share": None if worst is None else worst[1],
            "error": error,
            "noise_share": noise_share,
        }
        self._gradients.observers.on_event("ledger", fields)

    def _reconsider(self) -> None:
        """All ranks know that rank 0 sees a drift. A slow trial may be the link's fault: that, too, is measured first."""
        if self._link.rank == 0:
            observed_s, expected_s = self._watch.observed_s, self._watch.expected_s
            log.info("auto: steps take %.4g s, expected %.4g s; measuring again", observed_s, expected_s)
        self._enter("isolated")

    def _make_plan(self) -> None:
        """Measure, choose and broadcast; all ranks do this at the same step."""
        began_s = time.perf_counter()
        ranks = all_gather_object(self._link, {"machine": machine_id(), "sq": self._local_sq})
        ready_s = all_reduce_max(self._link, ready_times(self._tensors, self._times))
        if len(ranks) == 1:
            profile = profile_of_steps(self._tensors, ready_s, slowdown=1.0)
            plan = alone(profile.compute_s, self._settings.quality)
            if self._settings.fixed:
                plan = replace(plan, compress=self._settings.start[0], fuse=self._settings.start[1])
            self._change(ActivePlan(plan, [one.fqn for one in profile.specs], 0.0, plan.step_s, plan.step_s))
            return
        cluster = cluster_of(self._link, [one["machine"] for one in ranks])
        if self._network is None or not still_holds(self._network, self._link):  # most drifts are the machine's
            self._network = link_network(self._link, self._tensors)
        text = None
        if self._link.rank == 0:  # alone, so that nobody disturbs the clock
            profile = profile_of_steps(self._tensors, ready_s, cluster.slowdown)
            if self.active is None:
                self._noise = noise_over_ranks([one["sq"] for one in ranks], self._mean_sq)
                averaged = self._averaged()  # nothing where the loop has dropped its gradients
                self._errors = gradient_errors(self._settings.specs, averaged) if averaged else {}
            profile = replace(profile, noise=self._noise, errors=self._errors)
            codecs = codec_costs(self._settings.specs, self._tensors)
            self.pricer = Pricer(profile, self._network, codecs, cluster, self._host_curve(), scalars=1)
            text = self._activate(self._choose(self.pricer, cluster, began_s), self.pricer).to_text()
        self._change(read_active_plan(broadcast_object(self._link, text)))

    def _host_curve(self) -> Curve | None:
        if not any(parse_fusion(fuse).offloads for fuse in self._settings.fusions):
            return None
        return host_curve(self._tensors, self._channel.compressor)

    def _averaged(self) -> dict[str, Tensor]:
        """The means of the last step, by name."""
        return {n: p.grad.detach() for n, p in self._gradients.parameters.items() if p.grad is not None}

    def _choose(self, pricer: Pricer, cluster: Cluster, began_s: float) -> Plan:
        settings, profile = self._settings, pricer.measured
        if settings.fixed:
            return only_one(pricer, *settings.start, quality=settings.quality)
        budget = Budget(quality=settings.quality, experimental=True)  # the candidates are chosen already
        plan = choose(
            profile, pricer.network, pricer.codecs, cluster, budget=budget, fusions=settings.fusions, scalars=1
        )
        facts = {"step": str(self._channel.index), "planning_s": f"{time.perf_counter() - began_s:.2f}"}
        noise = profile.noise_share()
        return replace(plan, facts=facts if noise is None else {**facts, "noise_share": f"{noise:.3f}"})

    def _activate(self, plan: Plan, pricer: Pricer) -> ActivePlan:
        """The plan with what is expected of it."""
        before = self.active
        if before is None:
            in_use, observed_s, changed = self._settings.start[0], self._dense_s, True
        else:
            in_use, observed_s = before.plan.compress, self._watch.observed_s
            changed = (plan.compress, plan.fuse) != (in_use, before.plan.fuse)
        expected_s, dense_s = expectations(plan, in_use, observed_s)
        order = [tensor.fqn for tensor in pricer.profile.specs]
        before_s = median(self._clock.before_s(one) for one in self._times)
        drift = self._watch.refitted(changed=changed)
        groups = None
        if parse_fusion(plan.fuse).needs_profile:
            groups = tuple(pricer.group_plans(plan.compress, plan.fuse))
        active = ActivePlan(plan, order, before_s, expected_s, dense_s, drift=drift, groups=groups)
        if before is None or self._verdict != "dense" or not lost(before.plan, plan):
            return active
        dense_s, drift = before.dense_s, self._watch.refitted(changed=False)
        plan = back_to_dense(plan, self._watch.observed_s, dense_s)
        return replace(active, plan=plan, expected_s=dense_s, dense_s=dense_s, drift=drift)

    def _change(self, active: ActivePlan) -> None:
        """Follow a plan from the next step on."""
        compress, fuse = self._settings.start if self.plan is None else (self.plan.compress, self.plan.fuse)
        plan = active.plan
        changed = (plan.compress, plan.fuse) != (compress, fuse)
        regrouped = active.groups is not None and active.groups != tuple(self._channel.plan)
        self._follow(active, trial=changed)
        if plan.compress != compress:
            self.errors.forget_compression()
        if self._link.rank == 0:
            log.info("auto, from step %d on: %s", self._channel.index, summary(plan))
        self._gradients.observers.on_plan(self._channel.index, plan)
        if changed or regrouped:
            compressor = prepare(plan.compress) if plan.compress != compress else None
            self._gradients.use(compressor, self._groups(active))

    def _groups(self, active: ActivePlan) -> list[GroupPlan]:
        plan = active.plan
        if active.groups is not None:
            return list(active.groups)
        ordered = [self._channel.tensors[name] for name in active.order]
        return plan_groups(parse_fusion(plan.fuse), ordered, prepare(plan.compress), self._link.world_size)

    def _follow(self, active: ActivePlan, *, trial: bool) -> None:
        self.active = active
        tried = trial and active.plan.compress != DENSE and not self._settings.fixed
        self._watch = Watch(active.expected_s, active.dense_s if tried else float("inf"), active.drift)
        self._verdict = "fine"
        self._enter("watch")
