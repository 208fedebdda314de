"""DistributedDataParallel: thinwire as its communication hook.

DDP keeps its buckets, its ``no_sync`` and its handling of unused parameters; its buckets only say which gradients are ready.
What travels together are thinwire's own groups: DDP re-buckets after the first step and begins with other buckets after a
restart, and where blocks begin and what is drawn at random must not depend on that. No postponed annotations in this file:
DDP inspects the hook's and refuses strings.
"""

import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # missing from torch's stubs
from torch.nn.parallel import DistributedDataParallel

from thinwire.core import ConfigError
from thinwire.engine.base import Gradients
from thinwire.engine.hooks import Hook
from thinwire.engine.target import Target
from thinwire.exchange.transaction import Transaction


class _Switch:
    """The hook that DDP holds. DDP takes one for life, so it stays and is switched between engines and plain averaging."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._engine: weakref.ref[DDPEngine] | None = None

    @property
    def engine(self) -> "DDPEngine | None":
        """The engine at work. Its hook on the module keeps it: DDP's reducer holds this where no collector sees a cycle."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: "DDPEngine | None") -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __deepcopy__(self, memo: Any) -> "_Switch":
        """A copy of the DDP module is not attached, and process groups cannot be copied."""
        return _Switch(None)

    def __reduce__(self) -> tuple[type["_Switch"], tuple[None]]:
        return _Switch, (None,)


_switches: "WeakKeyDictionary[DistributedDataParallel, _Switch]" = WeakKeyDictionary()


def thinwire_hook(switch: _Switch, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP calls for each full bucket."""
    if switch.engine is not None:
        return switch.engine.on_bucket(bucket)
    buffer = bucket.buffer().div_(dist.get_world_size(switch.group))
    work = dist.all_reduce(buffer, group=switch.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class DDPEngine:
    """Answers DDP's buckets."""

    def __init__(self, target: Target, gradients: Gradients, *, broadcast_buffers: bool) -> None:
        module = target.module
        assert isinstance(module, DistributedDataParallel)
        self._target, self._gradients, self._module = target, gradients, module
        self._names = {id(parameter): name for name, parameter in target.parameters.items()}
        self._switch = _switch_of(module)
        if self._switch.engine is not None:
            raise ConfigError("this DDP module already has thinwire attached; detach() that first")
        self._switch.engine = self
        self._exchanging = True
        self._transaction: Transaction | None = None
        self._buckets: list[_Bucket] = []
        self._handle = module.register_forward_pre_hook(Hook(self._before_forward))

    @property
    def exchanging(self) -> bool:
        return self._exchanging

    @exchanging.setter
    def exchanging(self, value: bool) -> None:
        """Switched off in DDP too: it would send which parameters were used, and rank 0's buffers, in every step."""
        if value is not self._exchanging:
            self._exchanging = self._module.require_backward_grad_sync = value
            self._module.require_forward_param_sync = value

    def detach(self) -> None:
        """Give the buckets back to plain averaging, which is what DDP does without a hook."""
        self.exchanging = True
        self._switch.engine = None
        self._handle.remove()

    def no_sync(self) -> AbstractContextManager[None]:
        """DDP's own."""
        return self._module.no_sync()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add a bucket's gradients to the transaction; their means are written back into the bucket.

        DDP looks at the futures after the whole backward pass, so all of them complete together at its end.
        """
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.exchanging:
            future.set_result(buffer)
            return future
        in_backward = torch._C._current_graph_task_id() != -1
        if self._transaction is None:
            self._target.check_unchanged()
            self._transaction = self._gradients.begin()
            if in_backward:
                # Queued at the first bucket it runs before DDP's own callback, which is queued at the last. Errors raised
                # here keep their type; out of a future DDP would get them as something it cannot read.
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for name, view in self._views(bucket):
            self._transaction.add(name, view.to_dense() if view.is_sparse else view, None if view.is_sparse else view)
        self._buckets.append(_Bucket(buffer, future, [name for name, _ in self._views(bucket)]))
        if bucket.is_last():
            self._gradients.close(self._transaction, self._used())
            if not in_backward:  # a rank that has joined gives zeros for the others' sake: DDP.join()
                self._end_backward()
                self._gradients.between_steps()
        return future

    def _views(self, bucket: GradBucket) -> list[tuple[str, Tensor]]:
        """The gradients of a bucket by name. Frozen since DDP was made: nobody waits for it."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.is_sparse:  # such a parameter has a bucket of its own
            views = [buffer]
        elif parameters[0].is_complex():  # DDP's own views of complex gradients are of the wrong size
            pieces = buffer.split([2 * parameter.numel() for parameter in parameters])
            views = [one.view(*parameter.shape, 2) for one, parameter in zip(pieces, parameters, strict=True)]
        else:
            views = bucket.gradients()
        named = [(self._names.get(id(p)), view) for p, view in zip(parameters, views, strict=True)]
        return [(name, view) for name, view in named if name is not None]

    def _used(self) -> list[str]:
        """DDP does not tell which parameters were used; it fills in zeros for the others where it was told to look."""
        assert self._transaction is not None
        if not self._module.find_unused_parameters:
            return list(self._names.values())
        return [name for name, view in self._transaction.added.items() if bool(view.any())]

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        transaction, self._transaction, self._buckets = self._transaction, None, []
        if transaction is not None:  # the backward pass before this forward raised, and the other ranks wait
            transaction.abort()
            self._gradients.finish(transaction)
        if torch.is_grad_enabled():
            self._gradients.drop_discarded()

    def _end_backward(self) -> None:
        transaction, buckets = self._transaction, self._buckets
        self._transaction, self._buckets = None, []
        if transaction is None:
            return
        outcome = self._gradients.finish(transaction)
        for bucket in buckets:
            result = bucket.buffer
            if result.is_sparse:
                result = outcome.means[bucket.names[0]].to_sparse(1)
            if not outcome.committed:
                result = result.fill_(float("nan")) if not result.is_sparse else result * float("nan")
            # In the training thread: a daemon thread inside set_result when Python ends aborts the process.
            bucket.future.set_result(result)


class _Bucket(NamedTuple):
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    names: list[str]


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
