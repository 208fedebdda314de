"""One attached model's communication: exchanges of groups, the agreement that ends a step, and the state in between."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Counting, Framed, Scheduler, Ticket, Transport, fit_lanes
from thinwire.comm.job import FIRST_RESERVED_GROUP
from thinwire.comm.merge import Merged, merge
from thinwire.comm.piggyback import SmallSum
from thinwire.core import AllGather, Compressor, DesyncError, Exchanged, Request, State, Step, TensorSpec
from thinwire.engine.flat import flatten, lay_out
from thinwire.engine.groups import Group, Unit
from thinwire.engine.importance import importance
from thinwire.engine.meter import Meter
from thinwire.engine.norms import Norms
from thinwire.engine.received import Ages, aged_elems, check_ages
from thinwire.engine.states import StateStore
from thinwire.wrappers.host import stop_worker

SETUP_GROUP = FIRST_RESERVED_GROUP
_SIGNATURE_BITS = 32

WriteMean = Callable[[TensorSpec, Tensor], None]


class GradScaler(Protocol):
    """What is needed of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class Session:
    """Exchanges the gradients of one model, step by step.

    A step either counts on all ranks or on none: states are replaced only after all ranks have agreed that every gradient
    was finite. Otherwise residuals and all other state stay as they were. So they do for a tensor that no rank has used:
    nobody applies its mean, so nothing may be taken out of its residual. The agreement travels with the last group of a
    step, whose first round begins when all other groups have seen their gradients.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: Mapping[str, Tensor],
        tensors: Sequence[TensorSpec],
        compressor: Compressor,
        *,
        config: int,
        seed: int,
        scaler: GradScaler | None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        counting = Counting(transport)
        device = tensors[0].device
        self.scheduler = Scheduler(Framed(counting, config), device)
        self.transport = counting  # for measurements between steps; what they send is counted too
        self.compressor = compressor
        self.states = StateStore(tensors, compressor)
        self.ages = Ages(parameters, tensors, compressor)
        self._parameters, self._tensors, self._optimizer = parameters, tensors, optimizer
        self._names = [tensor.fqn for tensor in tensors]
        self.norms = Norms()
        self.meter = Meter(self.scheduler, counting)
        self.step = 0
        self.seed, self._config = seed, config
        self.device, self._scaler = device, scaler
        self.rank, self._world_size = transport.rank, transport.world_size
        self._new_states: dict[Unit, State] = {}
        self._aged_means: dict[str, Tensor] = {}  # of tensors of which only part arrives
        self._finite = True
        self._word: list[bool] | None = None  # what the ranks have agreed on in this step
        self._groups = 0
        self.last_skipped = False
        self.wish = False  # set between steps: this rank has something to agree on
        self.wished = False  # in the last step some rank had, as all ranks know

    def use(self, compressor: Compressor) -> None:
        """Another compressor from the next step on, with what is owed by the one before; only between steps."""
        since = self.ages.state_dict()
        self._install(self.states.converted(compressor), compressor)
        fresh = self.ages.state_dict()
        self.ages.load_state_dict({name: since.get(name, zeros) for name, zeros in fresh.items()})

    def restore(
        self,
        compressor: Compressor,
        tensors: Mapping[str, State],
        carried: Mapping[str, Tensor],
        ages: Mapping[str, Tensor],
    ) -> None:
        """Take over a compressor with its saved state.

        Raises:
            CheckpointError: it does not fit this model. Nothing is changed then.
        """
        states = StateStore(self._tensors, compressor)
        states.load(tensors, carried)
        check_ages(ages, aged_elems(self._tensors, compressor))
        self._install(states, compressor)
        self.ages.load_state_dict(ages)

    def _install(self, states: StateStore, compressor: Compressor) -> None:
        self.ages.detach()
        self.compressor, self.states = compressor, states
        self.ages = Ages(self._parameters, self._tensors, compressor)

    def use_groups(self, groups: Sequence[Group]) -> None:
        """Between steps: the fusion groups from now on. They decide whether rounds may travel in lanes of their own."""
        rounds = (unit.compressor.rounds for group in groups for unit in group.units)
        self.scheduler.in_lanes = fit_lanes(rounds, self.scheduler.transport.lanes)

    def submit(
        self,
        group: Group,
        gradients: dict[str, Tensor],
        write: WriteMean,
        *,
        used: Sequence[bool] | None = None,
        in_place: bool = False,
        buffers: Mapping[Unit, Tensor] = MappingProxyType({}),
    ) -> Ticket:
        """Queue the exchange of a group; ``write`` receives each tensor's mean, in a communication thread.

        Args:
            gradients: by parameter name; a missing one counts as zeros.
            used: with the last group of a step, and only then: for each of the model's tensors, whether this rank has a
                gradient for it.
            in_place: gradients that lie one behind the other in memory may be overwritten instead of copied.
            buffers: of units whose gradients are, in part, in their places already; each with ``agreement_numel`` elements
                more than the unit.
        """
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0

        def prepare() -> Merged:
            room = 0 if used is None else self.agreement_numel
            laid_out = [
                lay_out(unit, gradients, in_place=in_place, buffer=buffers.get(unit), room=room) for unit in group.units
            ]
            units = [self._exchange(unit, x, scale) for unit, (x, _) in zip(group.units, laid_out, strict=True)]
            return merge(units if used is None else [*units, self._agree(used, laid_out[-1][1])])

        def done(results: list[Any]) -> None:
            if used is not None:
                self._word = results.pop()
            for unit, result in zip(group.units, results, strict=True):
                self._new_states[unit] = result.state
                self.norms.add_mean(unit, result.mean)
                mean = result.mean if scale == 1.0 else result.mean * scale
                for tensor, part in zip(unit.spec.tensors, mean.split(unit.spec.sizes), strict=True):
                    write(tensor, part.view(tensor.shape))
                    if tensor.fqn in self.ages.names:
                        self._aged_means[tensor.fqn] = part

        ticket = self.scheduler.submit(prepare, done, step=self.step, group=self._groups)
        self._groups += 1
        self.meter.exchanged(sum(unit.spec.numel for unit in group.units))
        return ticket

    def _exchange(self, unit: Unit, x: Tensor, scale: float) -> Generator[Any, Any, Exchanged]:
        if scale != 1.0:
            x.div_(scale)  # residuals live in unscaled units, whatever the scaler does from step to step
        compressor, parameters = unit.compressor, self._parameters
        if not compressor.checks_finite and not kernels.all_finite(x):
            self._not_finite()
            x.zero_()
        self.norms.add_local(unit, x)
        self.states.add_carried(unit, x)
        weights = partial(flatten, unit, parameters) if compressor.needs_weights else None
        matters = importance(unit, parameters, self._optimizer) if compressor.needs_importance else None
        where = self.step, unit.spec, self.rank, self._world_size, self.seed
        step = Step(*where, weights, matters, on_not_finite=self._not_finite)
        return compressor.exchange(x, self.states.of(unit), step)

    def _not_finite(self) -> None:
        self._finite = False

    @property
    def agreement_numel(self) -> int:
        """How many flags the ranks agree on in a step."""
        return 2 + len(self._names) + 2 * _SIGNATURE_BITS

    def _agree(self, used: Sequence[bool], room: Tensor | None) -> Generator[SmallSum, Any, list[bool]]:
        """What is true on any rank of: not finite, a wish, and each tensor used.

        Reductions have no header by which ranks that have lost step are found out, so the bits of a signature go along,
        and their opposites: where both are set, two ranks differ.

        Args:
            room: free memory behind the gradients that the flags travel with.
        """
        assert len(used) == len(self._names)
        bits = self._signature_bits()
        mine = [not self._finite, self.wish, *used]
        flags = torch.tensor([*mine, *bits, *(not bit for bit in bits)], dtype=torch.uint8)
        anywhere: list[bool] = ((yield SmallSum(flags.to(self.device), self._world_size, room)) > 0).tolist()
        word, ones, zeros = anywhere[: len(mine)], anywhere[len(mine) : -len(bits)], anywhere[-len(bits) :]
        if any(one and zero for one, zero in zip(ones, zeros, strict=True)):
            expected = f"those of this rank at step {self.step}"
            raise DesyncError("step or settings", rank=None, got="another", expected=expected)
        return word

    def _signature_bits(self) -> list[bool]:
        # Only of what the training thread does not change while groups are under way.
        digest = zlib.crc32(f"{self._config}/{self.step}".encode())
        return [bool(digest >> bit & 1) for bit in range(_SIGNATURE_BITS)]

    def end_step(self, done: Callable[[bool, list[bool]], None]) -> Ticket:
        """Finish the step once all its groups have.

        Args:
            done: gets whether the step counts, and for each tensor whether any rank has used it; called in the
                communication thread.
        """

        def close() -> None:
            assert self._word is not None, "the last group of a step is submitted with what was used"
            bad, self.wished, *used_anywhere = self._word
            self._close_step(not bad, used_anywhere)
            done(not bad, used_anywhere)

        return self.scheduler.flush(close)

    def _close_step(self, counts: bool, used_anywhere: Sequence[bool]) -> None:
        self.norms.end_step(counts)
        if counts:
            unused = {name for name, used in zip(self._names, used_anywhere, strict=True) if not used}
            self.states.commit(self._new_states, untouched=unused)
            self.ages.end_step({name: mean for name, mean in self._aged_means.items() if name not in unused})
        else:
            self.ages.skip_step()
        self._new_states, self._aged_means = {}, {}
        self.last_skipped = not counts
        self._finite, self._word = True, None
        self._groups = 0
        self.step += 1

    def wait(self, ticket: Ticket) -> None:
        """Wait for a ticket on the training thread; the time is accounted as not hidden."""
        started_s = time.perf_counter()
        ticket.wait()
        self.scheduler.join_streams()
        self.meter.waited(started_s)

    def ask(self, request: Request) -> Any:
        """One request outside of any step, for example a broadcast at set-up."""
        replies: list[Any] = []

        def exchange() -> Generator[tuple[Request, ...], Any, Any]:
            return (yield (request,))

        self.scheduler.submit(exchange, replies.extend, step=self.step, group=SETUP_GROUP)
        self.wait(self.scheduler.flush())
        return replies[0]

    def meet(self) -> None:
        """Wait until all ranks are at this point."""
        self.ask(AllGather(torch.zeros(1, dtype=torch.uint8, device=self.device)))

    def gradients(self) -> dict[str, Tensor]:
        """What lies in the parameters' ``.grad``, by name; whether local or averaged is the engine's business."""
        return {name: p.grad.detach() for name, p in self._parameters.items() if p.grad is not None}

    def synchronize(self) -> None:
        """Wait until all that was asked of an accelerator is computed; nothing to do on CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def end_books(self) -> None:
        """Close the accounts of the step that has just ended."""
        self.meter.step_ended(self.step - 1, skipped=self.last_skipped)

    def close(self) -> None:
        """Stop the communication threads and end the record."""
        self.scheduler.close()
        self.ages.detach()
        stop_worker()
        self.meter.close()
