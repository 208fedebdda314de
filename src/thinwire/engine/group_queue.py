"""Gradients in, groups out: the part of a step that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from thinwire.core import TensorSpec
from thinwire.engine.groups import Group
from thinwire.engine.session import Session
from thinwire.engine.slots import Slots


class Steering(Protocol):
    """Who says which groups travel, and when they change: ``Regrouping``, or an ``Autopilot`` around it."""

    @property
    def quiet(self) -> bool:
        """Whether groups wait for the end of backward, so that it can be timed alone."""

    def groups(self) -> list[Group]:
        """The groups to use now."""

    def after_step(self, groups: Sequence[Group]) -> list[Group] | None:
        """Take in the step that has just ended; the new groups if all ranks change to others now."""


class GroupQueue:
    """Submits a group as soon as all its gradients are there *and* all groups before it were submitted.

    So the order of submission is the same on all ranks, whatever becomes ready first.

    Args:
        write: takes the mean of each tensor.
        used: for each of the model's tensors, whether this rank has a gradient for it; asked when the last group leaves.
        in_place: the gradients' memory may be used for the exchange; they are replaced anyway.
    """

    def __init__(
        self,
        session: Session,
        steering: Steering,
        write: Callable[[TensorSpec, Tensor], None],
        used: Callable[[], list[bool]],
        *,
        in_place: bool = False,
    ) -> None:
        self._session, self._steering, self._in_place = session, steering, in_place
        self._write, self._used = write, used
        self._slots = Slots(session.agreement_numel)
        self.use(steering.groups())

    def use(self, groups: list[Group]) -> None:
        """Change to other groups; only between steps."""
        self._groups = groups
        self._session.use_groups(groups)
        self._slots.use(groups)
        self._group_of = {tensor.fqn: index for index, group in enumerate(groups) for tensor in group.tensors}
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self.ready: dict[str, Tensor] = {}
        self._missing = [len(group.tensors) for group in self._groups]
        self._next = 0
        self._slots.clear()

    def place(self, name: str, gradient: Tensor) -> Tensor:
        """Where a gradient that may be moved should be; hand the result to ``add``."""
        return self._slots.put(name, gradient)

    def add(self, name: str, gradient: Tensor) -> None:
        """A gradient is ready."""
        if self._steering.quiet:
            self._session.synchronize()  # what is timed is when it was computed, not when that was asked for
        self._session.meter.gradient_ready(name)
        self.ready[name] = gradient
        self._missing[self._group_of[name]] -= 1
        if not self._steering.quiet:
            self._submit_ready()

    def submit_rest(self) -> None:
        """At the end of backward: what is still missing counts as zeros."""
        if self._steering.quiet:
            self._session.meet()  # ranks may share cores: nobody exchanges while another is timed
        while self._next < len(self._groups):
            self._submit_next()
        self._session.meter.backward_ended()

    def end_step(self) -> None:
        """After the wait: close the books, and change to other groups if the plan says so."""
        self._session.end_books()
        changed = self._steering.after_step(self._groups)
        if changed is not None:
            self.use(changed)

    def _submit_ready(self) -> None:
        while self._next < len(self._groups) and self._missing[self._next] == 0:
            self._submit_next()

    def _submit_next(self) -> None:
        group = self._groups[self._next]
        gradients = {tensor.fqn: self.ready[tensor.fqn] for tensor in group.tensors if tensor.fqn in self.ready}
        self._next += 1
        used = self._used() if self._next == len(self._groups) else None
        buffers = {unit: self._slots.buffers[unit] for unit in group.units if unit in self._slots.buffers}
        self._session.submit(group, gradients, self._write, used=used, in_place=self._in_place, buffers=buffers)
