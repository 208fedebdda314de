"""What ``attach`` returns."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.trace import Trace
from thinwire.core import CheckpointError, ConfigError, TensorSpec
from thinwire.engine.autopilot import Autopilot
from thinwire.engine.course import read_course
from thinwire.engine.ddp import DDPEngine
from thinwire.engine.groups import make_group
from thinwire.engine.plain import PlainEngine
from thinwire.engine.received import Received
from thinwire.engine.regroup import Regrouping
from thinwire.engine.session import Session
from thinwire.engine.stats import WireStats
from thinwire.fusion.prepare import prepare
from thinwire.plan.ledger import ErrorLedger
from thinwire.plan.price import DENSE, Pricer
from thinwire.plan.result import Plan

log = logging.getLogger(__name__)
STATE_VERSION = 3  # 2: ages; 3: plan, carried
_KEYS = ("step", "seed", "fusion", "plan", "tensors", "carried", "ages")


class Attached:
    """An attached wire. Use it as a context manager, or call ``detach()`` when done."""

    def __init__(
        self,
        engine: DDPEngine | PlainEngine,
        session: Session,
        regrouping: Regrouping,
        autopilot: Autopilot | None,
        tensors: list[TensorSpec],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._engine, self._session, self._regrouping = engine, session, regrouping
        self._autopilot, self._tensors = autopilot, tensors
        self._attached = True
        self._handle = optimizer.register_step_pre_hook(self._drop_bad_gradients) if optimizer is not None else None

    @property
    def plan(self) -> Plan | None:
        """With ``compress="auto"`` the plan in force, whose ``explain()`` says why; None before it is made, or without."""
        return None if self._autopilot is None else self._autopilot.plan

    @property
    def pricer(self) -> Pricer | None:
        """On rank 0 of ``compress="auto"``: the measurements behind the newest plan, which price other settings too."""
        return None if self._autopilot is None else self._autopilot.pricer

    @property
    def ledger(self) -> ErrorLedger | None:
        """With ``compress="auto"``: what compression has lost so far, against the noise of the gradients; None without."""
        return None if self._autopilot is None else self._autopilot.books.ledger

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; the next one outside averages their sum."""
        return self._engine.no_sync()

    def stats(self) -> WireStats:
        """Totals since ``attach``: steps, bytes, seconds."""
        return self._session.meter.stats()

    def received(self, parameter: Tensor) -> Received | None:
        """What ``parameter`` received in the last step and how old it was, for optimizers; None: all of it, one step old."""
        return self._session.ages.received(parameter)

    def trace(self) -> Trace:
        """What this rank did when in the last step; ``thinwire.comm.trace.write_chrome_trace`` writes it for Perfetto.

        Raises:
            ConfigError: no step has ended yet.
        """
        if self._session.meter.last_trace is None:
            raise ConfigError("there is nothing to trace before the first synchronised backward pass has ended")
        return self._session.meter.last_trace

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and other compressor state, by parameter name. Save one per rank.

        Holds only tensors, numbers, strings and None.
        """
        transport = self._session.scheduler.transport
        return {
            "version": STATE_VERSION,
            "rank": transport.rank,
            "world_size": transport.world_size,
            "compress": self._chosen(),
            "step": self._session.step,
            "seed": self._session.seed,
            "fusion": [group.to_json() for group in self._regrouping.plan],
            "plan": self._autopilot.saved() if self._autopilot is not None else None,
            "tensors": self._session.states.by_name(),
            "carried": {name: value.clone() for name, value in self._session.states.carried.items()},
            "ages": self._session.ages.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken.

        Raises:
            CheckpointError: it was taken of another model, compressor, rank or world size. Nothing is changed then.
        """
        transport = self._session.scheduler.transport
        expected = {
            "version": STATE_VERSION,
            "rank": transport.rank,
            "world_size": transport.world_size,
            "compress": self._chosen(),
        }
        for key, value in expected.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"the checkpoint's {key} is {state.get(key)!r}, expected {value!r}; load the state that this rank "
                    "saved under the same settings, or start without one (residuals then begin at zero)"
                )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise CheckpointError(f"the checkpoint lacks {missing}; load what wire.state_dict() has given, unchanged")
        groups = self._regrouping.read(state["fusion"])
        compressor = self._session.compressor
        if self._autopilot is not None:
            compressor = prepare(DENSE if state["plan"] is None else read_course(state["plan"]).plan.compress)
        self._session.restore(compressor, state["tensors"], state["carried"], state["ages"])
        self._session.step, self._session.seed = state["step"], state["seed"]
        if self._autopilot is not None:
            self._autopilot.load(state["plan"])
        self._regrouping.adopt(groups)
        self._engine.queue.use(self._regrouping.groups())

    def explain(self) -> str:
        """What is sent how, in a few lines."""
        world_size = self._session.scheduler.transport.world_size
        compressor = self._session.compressor
        group = make_group(self._tensors, compressor)
        lines = [f"thinwire on {world_size} rank{'s' * (world_size > 1)}: {compressor}"]
        if self._autopilot is not None:
            lines.append(f"  {self._autopilot.describe()}")
        for unit in group.units:
            sent = unit.compressor.wire_bytes(unit.spec, world_size)
            dense = 2 * (world_size - 1) * unit.spec.dense_bytes // world_size
            factor = f", {dense / sent:.1f} times less than fp32" if 0 < sent < dense else ""
            lines.append(
                f"  {unit.compressor}: {len(unit.spec.tensors)} tensors, {unit.spec.numel:,} values, "
                f"{sent / 1e6:.2f} MB per rank and step{factor}"
            )
        return "\n".join(lines)

    def detach(self) -> None:
        """Remove all hooks and stop the communication threads; the model is as it was before ``attach``."""
        if self._attached:
            self._attached = False
            self._engine.detach()
            if self._handle is not None:
                self._handle.remove()
            self._session.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _chosen(self) -> str:
        """What the user chose, as checkpoints record it."""
        return str(self._session.compressor) if self._autopilot is None else "auto"

    def _drop_bad_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Optimizers pass over parameters without gradient, so weights and moments stay as they were."""
        if self._session.last_skipped:
            log.warning("step %d skipped on all ranks: a gradient was NaN or Inf on some rank", self._session.step - 1)
            optimizer.zero_grad(set_to_none=True)
