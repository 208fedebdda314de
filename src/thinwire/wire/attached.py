"""What ``attach`` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.autopilot.controller import SIGNAL, Autopilot
from thinwire.comm.link import Link
from thinwire.comm.trace import Trace
from thinwire.core import ConfigError
from thinwire.engine.ages import Received
from thinwire.engine.base import Engine, Gradients, GradScaler
from thinwire.engine.hooks import Hook
from thinwire.engine.skip import SkipAborted
from thinwire.engine.target import Target, unwrap_optimizer
from thinwire.fusion.groups import make_group
from thinwire.observe.metrics import WireStats
from thinwire.plan.ledger import ErrorLedger
from thinwire.plan.price import Pricer
from thinwire.plan.result import Plan
from thinwire.sync.policy import Bound
from thinwire.wire import state as states
from thinwire.wrappers.host import stop_worker


class Attached:
    """An attached wire. Use it as a context manager, or call ``detach()`` when done."""

    def __init__(
        self,
        target: Target,
        engine: Engine,
        gradients: Gradients,
        links: Sequence[Link],
        *,
        autopilot: Autopilot | None,
        policy: Bound,
        scaler: GradScaler | None,
        auto: bool,
    ) -> None:
        link = links[0]
        self._engine, self._gradients, self._link, self._links = engine, gradients, link, links
        self._autopilot, self._policy, self._auto = autopilot, policy, auto
        self._planned_index = 0
        # With several optimizers the training step ends with the last one.
        self._last_optimizer = target.optimizers[-1] if target.optimizers else None
        self._skip = SkipAborted(gradients, target.optimizers, lambda: policy.is_local and link.world_size > 1)
        self._handles: list[Any] = [one.register_step_pre_hook(self._begin_step) for one in target.optimizers]
        self._handles += [one.register_step_post_hook(self._after_step) for one in target.optimizers]
        self._steps = 0
        self._scaler = None if type(policy) is Bound else scaler
        self._watch_scaler()
        if autopilot is not None:
            # A rank that only evaluates must never enter a collective, so planning runs where all ranks train: before an
            # optimizer steps, and where that does not happen (no optimizer, a scaler that skips) before the next forward.
            self._handles += [one.register_step_pre_hook(self._before_step) for one in target.optimizers]
            self._handles.append(target.module.register_forward_pre_hook(Hook(self._before_forward)))
            gradients.between_steps = self._plan
        # The module's hooks keep the engine, so the threads end with the module, or with the process.
        self._finalizer = weakref.finalize(engine, _close_all, links)

    @property
    def plan(self) -> Plan | None:
        """With ``compress="auto"`` the plan in force, whose ``explain()`` says why; None before it is made, or without."""
        return self._autopilot.plan if self._autopilot is not None and self._auto else None

    @property
    def pricer(self) -> Pricer | None:
        """On rank 0 of ``compress="auto"``: the measurements behind the newest plan, which price other settings too."""
        return None if self._autopilot is None else self._autopilot.pricer

    @property
    def ledger(self) -> ErrorLedger | None:
        """With ``compress="auto"``: what compression has lost so far, against the noise of the gradients; None without."""
        return self._autopilot.errors.ledger if self._autopilot is not None and self._auto else None

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; the next one outside averages their sum."""
        return self._engine.no_sync()

    def averaged(self, *, exact: bool = False) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all ranks agree on; afterwards this rank's own again. For evaluation and
        for saving a model; nothing changes where replicas are equal anyway.

        Args:
            exact: the mean of all replicas in full precision; it sends the whole model, so all ranks must come here. Else
                the anchor, the last weights that all ranks have agreed on, which any rank may look at alone.
        """
        return self._policy.averaged(exact=exact)

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of this rank's step, for policies that adapt to it."""
        self._policy.report_loss(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def idle_step(self) -> None:
        """With local steps: this rank takes none this time (it is slower, or out of data) but takes part in averages."""
        self._end_step(taken=False)

    def stats(self) -> WireStats:
        """Totals since ``attach``: steps, bytes, seconds."""
        return self._gradients.totals.stats(sum(link.sent_bytes for link in self._links)) + self._policy.totals.stats()

    def metrics(self) -> dict[str, float]:
        """Rates and seconds per step over the last 20 steps, flat, for any tracker; empty before the second step.

        Where gradients stay local they are per average of deltas instead.
        """
        found = (self._policy.totals if self._policy.is_local else self._gradients.totals).metrics()
        worst = self.ledger.worst("compression") if found and self.ledger is not None else None
        return found if worst is None else {**found, "thinwire/error_share": worst[1]}

    def received(self, parameter: Tensor) -> Received | None:
        """What ``parameter`` received in the last step and how old it was, for optimizers; None: all of it, one step old."""
        return self._gradients.ages.received(parameter)

    def trace(self) -> Trace:
        """What this rank did when in the last step; ``thinwire.comm.trace.write_chrome_trace`` writes it for Perfetto.

        Raises:
            ConfigError: no step has ended yet.
        """
        if self._gradients.last is None:
            raise ConfigError("there is nothing to trace before the first synchronised backward pass has ended")
        return self._gradients.last.trace

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and other compressor state, by parameter name. Save one per rank.

        Holds only tensors, numbers, strings and None.
        """
        return states.save(self._gradients, self._autopilot, self._policy, self._chosen())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken.

        Raises:
            CheckpointError: it was taken of another model, compressor, rank or world size. Nothing is changed then.
        """
        states.load(state, self._gradients, self._autopilot, self._policy, self._chosen())

    def explain(self) -> str:
        """What is sent how, in a few lines."""
        world_size, channel = self._link.world_size, self._gradients.channel
        ranks = f"thinwire on {world_size} rank{'s' * (world_size > 1)}"
        if self._policy.is_local:
            return "\n".join([f"{ranks}: gradients stay local", *self._policy.explain()])
        lines = [f"{ranks}: {channel.compressor}", *self._policy.explain()]
        if self._autopilot is not None and self._auto:
            lines.append(f"  {self._autopilot.describe()}")
        for unit in make_group(list(channel.tensors.values()), channel.compressor).units:
            sent = unit.compressor.wire_bytes(unit.spec, world_size)
            dense = 2 * (world_size - 1) * unit.spec.dense_bytes // world_size
            factor = f", {dense / sent:.1f} times less than fp32" if 0 < sent < dense else ""
            lines.append(
                f"  {unit.compressor}: {len(unit.spec.tensors)} tensors, {unit.spec.numel:,} values, "
                f"{sent / 1e6:.2f} MB per rank and step{factor}"
            )
        return "\n".join(lines)

    def detach(self) -> None:
        """Remove all hooks, end the threads, close the process groups; the model is as it was before ``attach``."""
        if self._finalizer.alive:
            self._engine.detach()
            self._skip.detach()
            for handle in self._handles:
                handle.remove()
            if self._scaler is not None:
                vars(self._scaler).pop("step", None)
            self._finalizer()
            self._gradients.ages.detach()
            self._gradients.observers.close()
            stop_worker()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _chosen(self) -> str:
        """What the user chose, as checkpoints record it."""
        return "auto" if self._auto else str(self._gradients.channel.compressor)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._plan()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._plan()

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._policy.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._gradients.applied()
        self._policy.stepped(optimizer)
        if optimizer is self._last_optimizer:
            self._end_step(taken=not self._skip.skipped)

    def _end_step(self, *, taken: bool) -> None:
        self._steps += 1
        self._policy.after_step(taken=taken)

    def _watch_scaler(self) -> None:
        """Where gradients stay local, one rank's scaler skips a step alone, and the optimizer's hooks never run: this rank
        would fall behind the others by a step for good. GradScaler has no hooks, so its ``step`` is wrapped."""
        step: Callable[..., Any] | None = getattr(self._scaler, "step", None)
        if step is None:
            return

        def watched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = step(optimizer, *args, **kwargs)
            if self._steps == before and unwrap_optimizer(optimizer) is self._last_optimizer:
                self._end_step(taken=False)
            return result

        vars(self._scaler)["step"] = watched

    def _plan(self) -> None:
        """Let the autopilot take in the last step; once per transaction."""
        index = self._gradients.channel.index
        if self._autopilot is not None and index != self._planned_index and self._gradients.last is not None:
            self._planned_index = index
            self._autopilot.between_steps(self._gradients.last_scalars.get(SIGNAL, []))


def _close_all(links: Sequence[Link]) -> None:
    for link in links:
        link.close()
