"""The gradient log: what every optimizer step was given, so that the step can be done again.

What is logged is ``.grad`` as the optimizer gets it: the mean over the ranks, after unscaling and clipping. (What a wire
commits is not enough: ``clip_grad_norm_`` comes later.) A gradient is copied while the optimizer steps, by a thread that is
joined before ``step()`` returns, because the loop may zero it then.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.blobs import blob, footer
from thinwire.checkpoint.client import Client
from thinwire.checkpoint.gradients import encode
from thinwire.checkpoint.optim_state import groups_of
from thinwire.checkpoint.state import TrainingState
from thinwire.core import ConfigError
from thinwire.engine.ages import reads_ages
from thinwire.observe.observer import Observer

NOT_YET = "no full checkpoint has been made yet"


class WireIndex(Observer):
    """Remembers how many transactions a wire has begun."""

    def __init__(self) -> None:
        self.index: int | None = None

    def on_commit(self, outcome: Any) -> None:
        self.index = outcome.index + 1


class GradientLog:
    """Collects what the optimizers are given between two calls of ``record``.

    Args:
        holds_gradients: False on ranks whose gradients another rank logs.
        batch: records that become durable together; a power failure loses at most so many steps.

    Attributes:
        broken: why nothing can be recorded until the next full checkpoint; empty if all is well.
        wire_index: of an attached wire.
    """

    def __init__(self, state: TrainingState, client: Client, rank: int, *, holds_gradients: bool, batch: int) -> None:
        for optimizer in state.optimizers:
            if reads_ages(optimizer):
                raise ConfigError(
                    f"thinwire.optim.{type(optimizer).__name__} also steps by the age of what it receives, which no log of "
                    "gradients holds; use log=False, or the optimizer of the same name in torch.optim"
                )
        if not state.optimizers:
            raise ConfigError("log=True needs the optimizer: give it to the Checkpointer")
        self._state, self._client, self._rank, self.batch = state, client, rank, batch
        self._holds_gradients = holds_gradients
        self._sizes: list[int] = []  # of the blobs of this record so far
        self._file, self._records = "", 0
        self._overlap, self._may_overlap = False, True  # once an optimizer was seen to leave gradients as they are
        self._encoding: threading.Thread | None = None
        self._versions: list[tuple[Tensor, int]] = []
        self.broken = NOT_YET
        self.wire_index = WireIndex()
        self._handles: list[Any] = []
        for number, optimizer in enumerate(state.optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._hook(number)))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def begin(self, step: int, run: str) -> None:
        """A full checkpoint of ``step`` was taken: what follows goes to a new file."""
        self._drop()
        self._file, self._records = names.log_name(step + 1, run, self._rank), 0
        self.broken = ""

    def record(self, step: int, before: str, after: str) -> None:
        """All that happened since the last call leads to ``step``; the writer appends it."""
        if not self.broken:
            # Settings once more: a scheduler has changed them since the step, for the next one.
            groups = [groups_of(one, self._state.names) for one in self._state.optimizers]
            tail = blob({**self._state.small(), "groups": groups, "wire_index": self.wire_index.index})
            end = footer([*self._sizes, tail.size])
            span = self._client.log_span(tail.size + len(end))
            if span is None:
                self.broken = "the writer is too far behind, and log_bytes of memory are full"
            else:
                tail.write(span[: tail.size])
                span[tail.size :] = end
                self._records += 1
                sync = self._records % self.batch == 0
                job = {"file": self._file, "step": step, "before": before, "after": after, "sync": sync}
                self._client.send_log(job)
        self._drop()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _drop(self) -> None:
        self._client.drop_spans()
        self._sizes = []

    def _hook(self, number: int) -> Any:
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self.broken:
                return
            if args[1:] or kwargs.get("closure") is not None:  # args[0] is the optimizer itself
                self.broken = f"{type(optimizer).__name__} computes gradients itself, in a closure"
                return
            self._begin_encoding(number, optimizer)

        return before_step

    def _begin_encoding(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p for group in optimizer.param_groups for p in group["params"]]
        # After an aborted transaction the wire takes all parameters away for the length of the step.
        skipped = not gradients
        named = [(self._state.names[id(p)], p.grad) for p in gradients if p.grad is not None]
        application: dict[str, Any] = {"optimizer": number, "skipped": skipped}
        if not skipped:
            application["groups"] = groups_of(optimizer, self._state.names)
        if not self._holds_gradients:
            named = []
        self._versions = [(gradient, gradient._version) for _, gradient in named]
        if self._overlap:
            self._encoding = threading.Thread(
                target=self._encode, args=(application, named), name="thinwire-log", daemon=True
            )
            self._encoding.start()
        else:
            self._encode(application, named)

    def _encode(self, application: dict[str, Any], named: list[tuple[str, Tensor]]) -> None:
        try:
            made = blob({**application, "gradients": encode(named)})
            span = self._client.log_span(made.size)
            if span is None:
                self.broken = "the writer is too far behind, and log_bytes of memory are full"
                return
            made.write(span)
            self._sizes.append(made.size)
        except Exception as error:  # in a thread: the training thread must hear of it, and go on
            self.broken = f"{type(error).__name__}: {error}"

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        overlapped, self._encoding = self._encoding, None
        if overlapped is not None:
            overlapped.join()
        if not self._versions:
            return
        # SGD with nesterov and foreach adds its momentum to the gradients themselves. Seen once, never overlapped again.
        untouched = all(gradient._version == version for gradient, version in self._versions)
        self._versions = []
        self._may_overlap = self._may_overlap and untouched
        self._overlap = self._may_overlap
        if overlapped is not None and not untouched:
            self.broken = "the optimizer has changed gradients while they were logged"
