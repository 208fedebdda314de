"""DistributedDataParallel: thinwire as its communication hook.

DDP keeps its buckets, its ``no_sync`` and its handling of unused parameters; only what happens to a full bucket changes. No
postponed annotations in this file: DDP inspects the hook's and refuses strings.
"""

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # missing from torch's stubs
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.scheduler import Ticket
from thinwire.core import ConfigError, TensorSpec
from thinwire.engine.groups import Group
from thinwire.engine.session import Session

MakeGroups = Callable[[list[TensorSpec]], list[Group]]


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
        make_groups: cuts the tensors of a bucket into fusion groups.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        parameters: dict[str, torch.nn.Parameter],
        make_groups: MakeGroups,
        session: Session,
    ) -> None:
        self.session = session
        self._module, self._make_groups = module, make_groups
        self._specs = {id(p): TensorSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()}
        self._groups: dict[tuple[int, ...], list[Group]] = {}
        self._switch = _switch_of(module)
        if self._switch.engine is not None:
            raise ConfigError("this DDP module already has thinwire attached; detach() that first")
        self._switch.engine = self
        self._last_bucket_s = 0.0

    def detach(self) -> None:
        """Give the buckets back to plain averaging, which is what DDP does without a hook."""
        self._switch.engine = None

    def no_sync(self):  # type: ignore[no-untyped-def]  # DDP's own context manager
        return self._module.no_sync()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Submit a bucket's groups; the future completes with the averaged bucket."""
        keys = tuple(id(p) for p in bucket.parameters())
        if keys not in self._groups:
            self._groups[keys] = self._make_groups([self._specs[key] for key in keys])
        for key in keys:
            self.session.meter.gradient_ready(self._specs[key].fqn)
        gradients = {self._specs[key].fqn: view for key, view in zip(keys, bucket.gradients(), strict=True)}

        def write(tensor: TensorSpec, mean: Tensor) -> None:
            gradients[tensor.fqn].copy_(mean)

        tickets = [self.session.submit(group, gradients, write) for group in self._groups[keys]]
        if not bucket.is_last():
            return _future(bucket.buffer(), tickets[-1])
        self.session.meter.backward_ended()
        self._last_bucket_s = time.perf_counter()
        return self._end_step(bucket.buffer())

    def _end_step(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """The last bucket also carries the outcome: a skipped step leaves NaN in it, for scalers and users to see."""

        def finish(counts: bool, flags: Tensor) -> None:
            if not counts:
                buffer.fill_(float("nan"))
            self.session.meter.waited(self._last_bucket_s)
            self.session.end_books()

        return _future(buffer, self.session.end_step(torch.empty(0, dtype=torch.uint8), finish))


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


def _future(buffer: Tensor, ticket: Ticket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)

    def finish(error: BaseException | None) -> None:
        if error is None:
            future.set_result(buffer)
        else:
            future.set_exception(error)  # type: ignore[arg-type]  # the stub wants a result here

    ticket.then(finish)
    return future
