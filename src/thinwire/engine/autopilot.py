"""``compress="auto"``: measure while training, plan, change over, and go on watching.

Steps of a first plan: a few dense ones to warm up, a few dense ones whose time is what dense takes, then *quiet* ones, whose
groups wait for the end of backward so that it is timed alone. Then all ranks measure the network together, rank 0 times
the compressors and chooses, and all take over its plan at the same step. Later rank 0 compares the steps with the
prediction. That it has timed enough, or has doubts, travels in a byte of the agreement that ends every step, so all ranks
hear of it at the same step. All ranks keep the same books of what compression loses, and leave a compressor that has come
to lose too much.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median
from typing import Literal

from thinwire.core import TensorSpec
from thinwire.engine.agreeing import agreed, gathered, latest
from thinwire.engine.bookkeeping import Books
from thinwire.engine.course import Course, read_course
from thinwire.engine.groups import Group
from thinwire.engine.measuring import codec_costs, gradient_errors, session_cluster, session_network
from thinwire.engine.regroup import Regrouping
from thinwire.engine.session import Session
from thinwire.engine.step_clock import StepClock
from thinwire.fusion import ModelProfile, Noise, parse_fusion
from thinwire.fusion.prepare import prepare
from thinwire.plan.cluster import Cluster, machine_id
from thinwire.plan.network import Network
from thinwire.plan.online import (
    StepTimes,
    alone,
    back_to_dense,
    expectations,
    lost,
    noise_over_ranks,
    profile_of_steps,
    ready_times,
    summary,
)
from thinwire.plan.price import DENSE, Pricer
from thinwire.plan.probe import holds
from thinwire.plan.quality import measured, requalified
from thinwire.plan.result import Plan
from thinwire.plan.search import Budget, Quality, choose
from thinwire.plan.watch import Verdict, Watch

log = logging.getLogger(__name__)

WARMUP_STEPS = 2  # connections, caches, allocations, DDP's new buckets
TIMED_S = 3.0  # steps of both kinds are timed until they make up this: short ones are noisy, long ones hold training up
FEWEST_DENSE_STEPS, DENSE_STEPS = 2, 4
FEWEST_QUIET_STEPS, QUIET_STEPS = 4, 12
PLANNING_STEPS = WARMUP_STEPS + DENSE_STEPS + QUIET_STEPS  # the first plan is made after so many at most

Phase = Literal["dense", "quiet", "watch"]


def planned_after(dense_s: float, compute_s: float) -> int:
    """After how many steps the first plan is made, where they take ``dense_s``, ``compute_s`` of it without communication."""
    dense = _steps_to_time(dense_s, FEWEST_DENSE_STEPS, DENSE_STEPS)
    return WARMUP_STEPS + dense + _steps_to_time(compute_s, FEWEST_QUIET_STEPS, QUIET_STEPS)


def _steps_to_time(step_s: float, fewest: int, most: int) -> int:
    return max(fewest, ceil(min(most, TIMED_S / max(step_s, 1e-9))))


@dataclass(frozen=True, kw_only=True)
class AutoSettings:
    """What the user allows.

    Args:
        specs: the candidates, dense among them.
        fusions: the candidates' fusions.
        start_fuse: of the first, dense steps.
    """

    quality: Quality
    specs: Sequence[str]
    fusions: Sequence[str]
    start_fuse: str


class Autopilot:
    """Steers a wire: which compressor and which groups, from one step to the next.

    Args:
        tensors: all tensors of the model.
    """

    def __init__(
        self, regrouping: Regrouping, session: Session, tensors: Sequence[TensorSpec], settings: AutoSettings
    ) -> None:
        self._regrouping, self._session, self._tensors, self._settings = regrouping, session, tensors, settings
        self._clock = StepClock(session)
        self.course: Course | None = None
        self.pricer: Pricer | None = None  # rank 0's: what the newest plan was made from, to ask about other settings
        self._start()

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first one is made."""
        return None if self.course is None else self.course.plan

    @property
    def quiet(self) -> bool:
        """Whether backward is being timed alone."""
        return self._phase == "quiet"

    def groups(self) -> list[Group]:
        """The groups to use now."""
        return self._regrouping.groups()

    def after_step(self, groups: Sequence[Group]) -> list[Group] | None:
        """Take in the step that has just ended; the new groups if all ranks change to others now."""
        changed = self._advance(groups, self._clock.read(gradients=self.quiet))
        if self.quiet:
            self._session.synchronize()  # the next step is timed from here
            self._session.meet()  # ranks may share cores: the end of this step must not slow down the next
        self._clock.resume()
        return changed

    def load(self, saved: str | None) -> None:
        """Go on with a course from a checkpoint, or begin anew where there was none yet; states are not touched.

        Args:
            saved: what ``saved`` gave.
        """
        self._start()
        if saved is None:
            self._regrouping.use(parse_fusion(self._settings.start_fuse))
            return
        course = read_course(saved)
        self._follow(replace(course, ledger=None), trial=False)
        if course.ledger is not None:
            self.books.ledger.load_json(course.ledger)
        self._regrouping.use(parse_fusion(course.plan.fuse))

    def saved(self) -> str | None:
        """What ``load`` takes, for checkpoints."""
        if self.course is None:
            return None
        return replace(self.course, ledger=self.books.ledger.to_json()).to_text()

    def _start(self) -> None:
        self.course, self._watch = None, Watch(0.0, float("inf"))
        self._dense_s = 0.0  # a dense step, before the first plan
        self._network: Network | None = None  # as it was last measured; the same on all ranks
        self._verdict: Verdict = "fine"
        self._session.norms.clear()
        self.books = Books(self._session)
        self._noise: dict[str, Noise] = {}  # of rank 0's first plan, which measures these for all later ones
        self._errors: dict[str, dict[str, float]] = {}
        self._enter("dense")

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._session.wish = False
        self._times: list[StepTimes] = []
        if phase == "watch":
            self.books.open_step()
        else:  # for the first plan
            self._session.norms.wanted = phase == "quiet" and self.course is None

    def _advance(self, groups: Sequence[Group], times: StepTimes) -> list[Group] | None:
        if self._phase == "watch":
            if self._session.wished:
                self._reconsider()
                return None
            self._observe(times)
            return self._keep_books(groups) or self._regrouping.after_step(groups)
        self._times.append(times)
        if self._phase == "quiet":
            if self._session.wished:
                return self._make_plan()
            self._time_enough([one.compute_s for one in self._times], FEWEST_QUIET_STEPS, QUIET_STEPS)
        elif self._session.wished:
            self._dense_s = self._clock.usual_s(self._times[WARMUP_STEPS:])
            self._enter("quiet")
        elif len(self._times) >= WARMUP_STEPS:
            self._time_enough([one.step_s for one in self._times[WARMUP_STEPS:]], FEWEST_DENSE_STEPS, DENSE_STEPS)
        return None

    def _time_enough(self, timed_s: Sequence[float], fewest: int, most: int) -> None:
        """Rank 0 says beforehand that the next step is the last one of its phase."""
        enough = len(timed_s) + 1 >= _steps_to_time(fmean(timed_s or [0.0]), fewest, most)
        self._session.wish = self._session.rank == 0 and enough

    def _observe(self, times: StepTimes) -> None:
        """Rank 0 alone, and only if there is a network to have doubts about."""
        if self._session.rank != 0 or self._session.transport.world_size == 1:
            return
        assert self.course is not None
        self._verdict = self._watch.add(self._clock.step_s(times, self.course.before_s))
        self._session.wish = self._verdict != "fine"

    def _keep_books(self, groups: Sequence[Group]) -> list[Group] | None:
        """The new groups if what is in use has come to lose too much, or what was refused no longer does."""
        assert self.course is not None
        booked = self.books.close_step(groups)
        self.books.open_step()
        if not booked:
            return None
        found, plan = measured(self.books.ledger, self._session.transport.world_size), self.course.plan
        if self._session.meter.recorder is not None:
            self._session.meter.recorder.ledger(self._session.step - 1, self.books.ledger, found)
        changed = plan if found is None else requalified(plan, found)
        if changed is plan:
            return None
        expected_s, dense_s = expectations(changed, plan.compress, self.course.expected_s)
        return self._change(replace(self.course, plan=changed, expected_s=expected_s, dense_s=dense_s))

    def _reconsider(self) -> None:
        """All ranks know that rank 0 has doubts. A slow trial may be the link's fault: that, too, is measured first."""
        if self._session.rank == 0:
            observed_s, expected_s = self._watch.observed_s, self._watch.expected_s
            log.info("auto: steps take %.4g s, expected %.4g s; measuring again", observed_s, expected_s)
        self._enter("quiet")

    def _make_plan(self) -> list[Group] | None:
        """Measure, choose and agree; all ranks do this at the same step."""
        began_s = time.perf_counter()
        norms = self._session.norms
        ranks = gathered(self._session, {"machine": machine_id(), "sq": norms.local_sq})
        ready_s = latest(self._session, ready_times(self._tensors, self._times))
        if len(ranks) == 1:
            profile = profile_of_steps(self._tensors, ready_s, slowdown=1.0)
            plan, order = alone(profile.compute_s, self._settings.quality), [one.fqn for one in profile.specs]
            return self._change(Course(plan, order, 0.0, plan.step_s, plan.step_s))
        cluster = session_cluster(self._session, [one["machine"] for one in ranks])
        network = self._network = self._measured_network()
        course = None
        if self._session.rank == 0:  # alone, so that nobody disturbs the clock
            profile = profile_of_steps(self._tensors, ready_s, cluster.slowdown)
            if self.course is None:
                self._noise = noise_over_ranks([one["sq"] for one in ranks], norms.mean_sq)
                self._errors = gradient_errors(self._settings.specs, self._session.gradients())
            profile = replace(profile, noise=self._noise, errors=self._errors)
            course = self._course(self._choose(profile, network, cluster, began_s), profile).to_text()
        return self._change(read_course(agreed(self._session, course)))

    def _measured_network(self) -> Network:
        """What was measured before, where the network still is as it was then: most doubts are about the machine."""
        if self._network is not None and holds(self._network, self._session.transport, self._session.device):
            return self._network
        return session_network(self._session, self._tensors)

    def _choose(self, profile: ModelProfile, network: Network, cluster: Cluster, began_s: float) -> Plan:
        codecs = codec_costs(self._settings.specs, self._tensors)
        self.pricer = Pricer(profile, network, codecs, cluster)
        budget = Budget(quality=self._settings.quality, experimental=True)  # the candidates are chosen already
        plan = choose(profile, network, codecs, cluster, budget=budget, fusions=self._settings.fusions)
        facts = {"step": str(self._session.step), "planning_s": f"{time.perf_counter() - began_s:.2f}"}
        noise = profile.noise_share()
        return replace(plan, facts=facts if noise is None else {**facts, "noise_share": f"{noise:.3f}"})

    def _course(self, plan: Plan, profile: ModelProfile) -> Course:
        """The plan with what is expected of it."""
        before = self.course
        if before is None:
            in_use, observed_s, changed = DENSE, self._dense_s, True
        else:
            in_use, observed_s = before.plan.compress, self._watch.observed_s
            changed = (plan.compress, plan.fuse) != (in_use, before.plan.fuse)
        expected_s, dense_s = expectations(plan, in_use, observed_s)
        order = [tensor.fqn for tensor in profile.specs]
        before_s = median(self._clock.before_s(one) for one in self._times)
        course = Course(plan, order, before_s, expected_s, dense_s, drift=self._watch.refitted(changed=changed))
        if before is None or self._verdict != "dense" or not lost(before.plan, plan):
            return course
        dense_s, drift = before.dense_s, self._watch.refitted(changed=False)
        plan = back_to_dense(plan, self._watch.observed_s, dense_s)
        return replace(course, plan=plan, expected_s=dense_s, dense_s=dense_s, drift=drift)

    def _change(self, course: Course) -> list[Group] | None:
        """Follow a course from the next step on."""
        before = (DENSE, self._settings.start_fuse) if self.plan is None else (self.plan.compress, self.plan.fuse)
        plan = course.plan
        changed = (plan.compress, plan.fuse) != before
        self._follow(course, trial=changed)
        if changed:
            self.books.forget_compression()
        if self._session.rank == 0:
            log.info("auto, from step %d on: %s", self._session.step, summary(plan))
        if self._session.meter.recorder is not None:
            self._session.meter.recorder.plan(self._session.step, plan)
        if not changed:
            return None
        self._session.use(prepare(plan.compress))
        self._regrouping.use(parse_fusion(plan.fuse), course.order)
        return self._regrouping.groups()

    def _follow(self, course: Course, *, trial: bool) -> None:
        self.course = course
        tried = trial and course.plan.compress != DENSE
        self._watch = Watch(course.expected_s, course.dense_s if tried else float("inf"), course.drift)
        self._verdict = "fine"
        self._enter("watch")

    def describe(self) -> str:
        """One line for people."""
        if self.plan is None:
            return f"auto: dense while measuring; a plan is made after step {PLANNING_STEPS} at the latest"
        return f"auto: {summary(self.plan)}"
