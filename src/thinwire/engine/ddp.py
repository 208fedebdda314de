"""DistributedDataParallel: thinwire as its communication hook.

DDP keeps its buckets, its ``no_sync`` and its handling of unused parameters; its buckets only say which gradients are ready.
What travels together are thinwire's own groups: DDP re-buckets after the first step and begins with other buckets after a
restart, and where blocks begin and what is drawn at random must not depend on that. No postponed annotations in this file:
DDP inspects the hook's and refuses strings.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # missing from torch's stubs
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm import Ticket
from thinwire.core import ConfigError, TensorSpec
from thinwire.engine.group_queue import GroupQueue, Steering
from thinwire.engine.session import Session


class _Switch:
    """The hook that DDP holds. DDP takes one for life, so it stays and is switched between engines and plain averaging."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.engine: DDPEngine | None = None


_switches: "WeakKeyDictionary[DistributedDataParallel, _Switch]" = WeakKeyDictionary()


def thinwire_hook(switch: _Switch, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each full bucket."""
    if switch.engine is not None:
        return switch.engine.on_bucket(bucket)
    buffer = bucket.buffer().div_(dist.get_world_size(switch.group))
    work = dist.all_reduce(buffer, group=switch.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class DDPEngine:
    """Answers DDP's buckets.

    Args:
        parameters: the ones DDP averages, by name.
        steering: the fusion groups, and when they change.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        parameters: dict[str, torch.nn.Parameter],
        steering: Steering,
        session: Session,
    ) -> None:
        self.session = session
        self._ticket: Ticket | None = None
        self._module = module
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._switch = _switch_of(module)
        if self._switch.engine is not None:
            raise ConfigError("this DDP module already has thinwire attached; detach() that first")
        self._switch.engine = self
        self.queue = GroupQueue(session, steering, self._write, self._used)
        self._reset()

    def detach(self) -> None:
        """Give the buckets back to plain averaging, which is what DDP does without a hook."""
        self._switch.engine = None

    def no_sync(self):  # type: ignore[no-untyped-def]  # DDP's own context manager
        return self._module.no_sync()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take note of a bucket's gradients and submit the groups that are complete, in their fixed order.

        DDP looks at the futures after the whole backward pass, so all of them complete together at the end of the step.
        """
        if not self._buckets:
            # Errors raised here keep their type; out of a future DDP would get them as something it cannot read.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(id(parameter))
            if name is not None:  # frozen since DDP was made: nobody waits for it
                self.queue.add(name, view)
        future = _new_future(bucket.buffer())
        self._buckets.append((bucket.buffer(), future))
        if bucket.is_last():
            self.queue.submit_rest()
            self._ticket = self.session.end_step(self._finish)
            buckets = self._buckets  # the training thread may go on, and reset, before the last future is set
            self._ticket.then(lambda error: _complete(buckets, error))
        return future

    def _reset(self) -> None:
        self.queue.clear()
        self._buckets: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        self._ticket = None

    def _write(self, tensor: TensorSpec, mean: Tensor) -> None:
        self.queue.ready[tensor.fqn].copy_(mean)

    def _used(self) -> list[bool]:
        """DDP does not tell which parameters were used; it fills in zeros for the others where it was told to look."""
        if not self._module.find_unused_parameters:
            return [True] * len(self._names)
        return [bool(self.queue.ready[name].any()) for name in self._names.values()]

    def _finish(self, counts: bool, used: list[bool]) -> None:
        """A skipped step leaves NaN, for scalers and users to see."""
        if not counts:
            for buffer, _ in self._buckets:
                buffer.fill_(float("nan"))

    def _end_backward(self) -> None:
        if self._ticket is not None:
            try:
                self.session.wait(self._ticket)
                self.queue.end_step()
            finally:
                self._reset()


def _switch_of(module: DistributedDataParallel) -> _Switch:
    if module not in _switches:
        switch = _Switch(module.process_group)
        try:
            module.register_comm_hook(switch, thinwire_hook)
        except RuntimeError as error:
            raise ConfigError(
                f"DDP refused thinwire's communication hook ({error}); attach to a DDP module without another hook"
            ) from error
        _switches[module] = switch
    return _switches[module]


def _complete(buckets: list[tuple[Tensor, torch.futures.Future[Tensor]]], error: BaseException | None) -> None:
    for buffer, future in buckets:
        if error is None:
            future.set_result(buffer)
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # the stub wants a result here


def _new_future(buffer: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
