"""DistributedDataParallel: thinwire as its communication hook.

DDP keeps its buckets, its ``no_sync`` and its handling of unused parameters; its buckets only say which gradients are ready.
What travels together are thinwire's own groups: DDP re-buckets after the first step and begins with other buckets after a
restart, and where blocks begin and what is drawn at random must not depend on that. No postponed annotations in this file:
DDP inspects the hook's and refuses strings.
"""

from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # missing from torch's stubs
from torch.nn.parallel import DistributedDataParallel

from thinwire.core import ConfigError
from thinwire.engine.base import Gradients
from thinwire.engine.target import Target
from thinwire.exchange.transaction import Transaction


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
    """Answers DDP's buckets."""

    exchanging = True

    def __init__(self, target: Target, gradients: Gradients, *, broadcast_buffers: bool) -> None:
        module = target.module
        assert isinstance(module, DistributedDataParallel)
        self._gradients, self._module = gradients, module
        self._names = {id(parameter): name for name, parameter in target.parameters.items()}
        self._switch = _switch_of(module)
        if self._switch.engine is not None:
            raise ConfigError("this DDP module already has thinwire attached; detach() that first")
        self._switch.engine = self
        self._transaction: Transaction | None = None
        self._buckets: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    def detach(self) -> None:
        """Give the buckets back to plain averaging, which is what DDP does without a hook."""
        self._switch.engine = None

    def no_sync(self) -> AbstractContextManager[None]:
        """DDP's own."""
        return self._module.no_sync()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add a bucket's gradients to the transaction; their means are written back into the bucket.

        DDP looks at the futures after the whole backward pass, so all of them complete together at its end.
        """
        if not self.exchanging:
            return _done(bucket.buffer())
        if self._transaction is None:
            self._transaction = self._gradients.begin()
            # Queued at the first bucket it runs before DDP's own callback, which is queued at the last. Errors raised
            # here keep their type; out of a future DDP would get them as something it cannot read.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(id(parameter))
            if name is not None:  # frozen since DDP was made: nobody waits for it
                self._transaction.add(name, view, out=view)
        future: torch.futures.Future[Tensor] = _new_future(bucket.buffer())
        self._buckets.append((bucket.buffer(), future))
        if bucket.is_last():
            self._gradients.close(self._transaction, self._used())
        return future

    def _used(self) -> list[str]:
        """DDP does not tell which parameters were used; it fills in zeros for the others where it was told to look."""
        assert self._transaction is not None
        if not self._module.find_unused_parameters:
            return list(self._names.values())
        return [name for name, view in self._transaction.added.items() if bool(view.any())]

    def _end_backward(self) -> None:
        transaction, buckets = self._transaction, self._buckets
        self._transaction, self._buckets = None, []
        if transaction is None:
            return
        outcome = self._gradients.finish(transaction)
        for buffer, future in buckets:
            if not outcome.committed:
                buffer.fill_(float("nan"))  # for scalers and users to see
            # In the training thread: a daemon thread inside set_result when Python ends aborts the process.
            future.set_result(buffer)


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


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future = _new_future(buffer)
    future.set_result(buffer)
    return future


def _new_future(buffer: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
