"""``attach``: one line that puts thinwire between a model and its gradients."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from thinwire.autopilot.controller import SIGNAL, Autopilot, AutoSettings
from thinwire.autopilot.expect import AUTO_FUSIONS, auto_specs
from thinwire.comm.link import Link
from thinwire.comm.liveness import Liveness, default_timeout
from thinwire.comm.torch_dist import GLOO_LANES, TorchDistTransport
from thinwire.comm.transport import Tag, Transport
from thinwire.core import AllGather, Compressor, ConfigError, DesyncError, TensorSpec, TransportError
from thinwire.engine.ages import reads_ages, warn_if_blind
from thinwire.engine.base import Gradients, GradScaler, ParameterSide
from thinwire.engine.target import Target, resolve
from thinwire.exchange.channel import Channel
from thinwire.exchange.membership import Fixed
from thinwire.fusion import parse_fusion
from thinwire.fusion.groups import plan_groups
from thinwire.fusion.prepare import prepare
from thinwire.observe.observer import Observer, Observers
from thinwire.observe.recorder import Recorder
from thinwire.plan.price import DENSE
from thinwire.plan.result import Plan
from thinwire.plan.search import Budget, Quality
from thinwire.sync.context import Context
from thinwire.sync.every_step import EveryStep
from thinwire.sync.policy import Bound, Policy, parse_policy
from thinwire.wire.attached import Attached

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def attach(
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    compress: str | Compressor = "auto",
    fuse: str = "auto",
    sync: str = "every_step",
    plan: Plan | None = None,
    quality: Quality = "safe",
    scaler: GradScaler | None = None,
    broadcast_buffers: bool = True,
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    events: str | Path | None = None,
    observers: Sequence[Observer] = (),
    seed: int = 0,
    timeout_s: float = 60.0,
) -> Attached:
    """Average the gradients of ``module`` over all ranks, compressed, while backward runs.

    Works on a plain module (do not wrap it in DDP then) and on a ``DistributedDataParallel`` module. The process group must
    be initialised. All ranks call it at the same point with the same arguments.

    Args:
        optimizer: the optimizer of these parameters, or several in a list. With it, a step in which any rank has a NaN or
            Inf gradient is skipped on all ranks; without it such a step leaves NaN gradients, as plain DDP does.
        compress: what each gradient sends, for example ``"topk(density=0.01) | fp16"``; see ``thinwire.available()``.
            ``"auto"``: thinwire times 8 to 18 dense steps, the network and the candidates, then switches all ranks to the
            fastest setting, or stays dense where nothing is faster by more than 3 %. ``wire.plan`` says what and why. It
            re-plans when step time drifts.
        fuse: which gradients travel together: ``"auto"``, ``"none"``, a size such as ``"2MiB"``, or a planner that measures
            first: ``"safusion"``, ``"ssfusion"``, ``"optimal"``. With ``compress="auto"``, ``"auto"`` is planned too.
        sync: when workers synchronise: ``"every_step"``, or local steps whose deltas are averaged: ``"stream"`` in a few
            bits without ever waiting, ``"local(h=8)"``, ``"diloco"``, ...; ``thinwire.sync.policies()`` lists them.
            ``compress`` is then for gradients only, where a policy averages some.
        plan: a plan made elsewhere (``thinwire plan --json``, read by ``thinwire.plan.Plan.load``): its compressor and
            fusion are used from the first step on, instead of ``compress="auto"``.
        quality: what ``"auto"`` may choose: ``"exact"`` dense and 16 bits, ``"safe"`` few bits too, ``"fast"`` also a
            sparsifier, if the optimizer knows how old updates are (``thinwire.optim``).
        scaler: the ``torch.amp.GradScaler`` in use, so that residuals survive changes of its scale.
        broadcast_buffers: plain modules only: broadcast rank 0's buffers before each training forward, as DDP does.
        process_group: plain modules only: the ranks to average over; default: all.
        transport: who carries the messages; default: process groups of its own over these ranks.
        events: a directory for one JSONL file of events per rank, to be read by ``thinwire report``.
        observers: told of every step and plan (``thinwire.observe.Observer``), in the training thread.
        seed: seed of random choices such as random-k.
        timeout_s: how long a rank may give no sign of life before the others give up. A rank that is only slow is waited
            for as long as DDP would.

    Raises:
        ConfigError: something does not exist or does not fit; the message says what to do.
        DesyncError: the ranks have attached different models or settings.
    """
    policy = parse_policy(sync)
    if not policy.exchanges_gradients:
        compress, fuse = _ungraded(sync, plan, compress, fuse)
    if plan is not None:
        compress, fuse = _planned(plan, compress, fuse)
    auto = compress == "auto"
    target = resolve(module, optimizer)
    if not (target.optimizers or isinstance(policy, EveryStep)):
        raise ConfigError(f"sync={sync!r} needs the optimizer, whose steps it follows; give it to attach()")
    compressor, planner = prepare(DENSE if auto else compress), parse_fusion(fuse)
    planner.check(compressor)
    settings = _settings(target, "auto" if auto else str(compressor), fuse, quality)
    tensors = target.tensors
    wanted = f"auto {quality}" if auto else str(compressor)
    config = fingerprint(tensors, wanted, fuse, sync, str(seed), str(broadcast_buffers), str(scaler is None))
    given = transport
    if transport is None:
        transport = _own_transport(target, process_group, timeout_s)
    link = Link(transport, target.device, config=config)
    links = [link]
    try:
        _check_same_everywhere(transport, config, target.device)
        # Gradients become ready roughly in reverse order of registration.
        groups = plan_groups(planner, tensors[::-1], compressor, link.world_size)
        channel = Channel(
            "grad",
            tensors,
            Fixed(link),
            compressor,
            groups,
            seed=seed,
            scalars=() if settings is None else (SIGNAL,),
            owns_inputs=target.kind.name == "plain",
            side=ParameterSide(target.parameters, target.optimizers),
        )
        gradients = Gradients(channel, target.parameters, scaler=scaler, observers=Observers(observers))
        autopilot = Autopilot(gradients, settings) if settings is not None else None
        engine = target.engine(gradients, broadcast_buffers=broadcast_buffers)
        bound = Bound()
        if not isinstance(policy, EveryStep):
            if (
                link.world_size > 1 and given is None and transport.lanes > 1
            ):  # NCCL must have one link for all channels
                strides = [parameter.stride() for parameter in target.parameters.values()]  # slices follow the memory
                outer = fingerprint(tensors, sync, str(seed), str(strides))
                own = _own_transport(target, process_group, timeout_s)
                links.append(Link(own, target.device, name="outer", config=outer))
            bound = _bind(
                policy,
                Context(
                    parameters=target.parameters,
                    statistics=target.statistics,
                    optimizers=target.optimizers,
                    link=links[-1],
                    engine=engine,
                    seed=seed,
                    observers=gradients.observers,
                    check=target.check_unchanged,
                ),
            )
    except BaseException:
        for one in links:
            one.close()
        raise
    if target.optimizers and link.rank == 0:
        warn_if_blind(target.optimizers, gradients.ages)
    wire = Attached(target, engine, gradients, links, autopilot=autopilot, policy=bound, scaler=scaler, auto=auto)
    if events is not None:
        chosen = "auto" if auto else str(compressor)
        rank, world_size = link.rank, link.world_size
        recorder = Recorder(Path(events), rank=rank, world_size=world_size, compress=chosen, explanation=wire.explain())
        gradients.observers.add(recorder)
    return wire


def fingerprint(tensors: Sequence[TensorSpec], *settings: str) -> int:
    """64 bits that differ when model or settings differ; carried by every message."""
    model = [f"{t.fqn}{t.shape}{t.dtype}" for t in tensors]
    digest = hashlib.blake2b(repr((model, settings)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _bind(policy: Policy, context: Context) -> Bound:
    if context.link.world_size > 1:
        return policy.bind(context)
    context.engine.exchanging = False
    return Bound(is_local=True)


def _ungraded(sync: str, plan: Plan | None, compress: str | Compressor, fuse: str) -> tuple[str, str]:
    """The settings of gradients that nobody sends."""
    if plan is not None or compress != "auto" or fuse != "auto":
        raise ConfigError(
            f"sync={sync!r} averages no gradients; leave out compress=, fuse= and plan=, and say inside sync= what deltas "
            "send, for example sync=\"local(h=8, compress='int4')\""
        )
    return DENSE, "auto"


def _planned(plan: Plan, compress: str | Compressor, fuse: str) -> tuple[str, str]:
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is a {type(plan).__name__}; expected a plan of the planner, such as Plan.load gives")
    if compress != "auto" or fuse != "auto":
        raise ConfigError(f"plan says {plan.compress!r}, fuse={plan.fuse!r}; leave out compress= and fuse=")
    return plan.compress, plan.fuse


def _settings(target: Target, compress: str, fuse: str, quality: Quality) -> AutoSettings | None:
    """What the autopilot may do; None where there is nothing to plan."""
    quality = Budget(quality=quality).quality  # refuses what it does not know
    if compress == "auto":
        aware = bool(target.optimizers) and all(reads_ages(optimizer) for optimizer in target.optimizers)
        specs, fusions = auto_specs(quality, reads_ages=aware), AUTO_FUSIONS if fuse == "auto" else (fuse,)
        return AutoSettings(quality=quality, specs=specs, fusions=fusions, start=(DENSE, fuse))
    if parse_fusion(fuse).needs_profile:
        start = compress, fuse
        return AutoSettings(quality=quality, specs=(DENSE, compress), fusions=(fuse,), start=start, fixed=True)
    return None


def _own_transport(target: Target, group: dist.ProcessGroup | None, timeout_s: float) -> TorchDistTransport:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group('gloo') (or 'nccl') first "
            "and start the script with torchrun, on one machine for example 'torchrun --nproc-per-node 2 train.py'"
        )
    averaged = target.process_group if target.process_group is not None else group or dist.group.WORLD
    assert averaged is not None
    ranks = dist.get_process_group_ranks(averaged)
    liveness = Liveness(distributed_c10d._get_default_store(), ranks, dist.get_rank(averaged), timeout_s)
    # gloo's process groups work side by side; NCCL's must be used in the same order on all ranks.
    is_gloo = target.device.type == "cpu" and "gloo" in dist.get_backend(averaged)
    # Where not all ranks are members the others do not come here, so only members may be waited for.
    local = len(ranks) < dist.get_world_size()
    try:
        _attaches[tuple(ranks)] += 1
        count = _attaches[tuple(ranks)]
        liveness.arrive(f"attach{count}")
        timeout = timedelta(seconds=liveness.silence_s) if is_gloo else default_timeout()
        groups = []
        for lane in range(GLOO_LANES if is_gloo else 1):
            with _group_name(f"thinwire-{ranks}-{count}-{lane}"):
                group = dist.new_group(ranks if local else None, timeout, use_local_synchronization=local)
            groups.append(group)
        for one in groups if is_gloo else ():  # connected; from here on the living are waited for as DDP would
            distributed_c10d._set_pg_timeout(default_timeout(), one)
    except RuntimeError as error:
        try:
            raise TransportError(f"attach failed on rank {dist.get_rank()}: {error}. {liveness.roll_call()}") from error
        finally:
            liveness.close()
    return TorchDistTransport(groups[0], liveness, groups[1:], owned=True)


@contextmanager
def _group_name(name: str) -> Iterator[None]:
    """What torch calls a process group that only its members make.

    torch derives the name from the ranks and from how many groups exist. After a group was destroyed the next one gets its
    name, and with it the addresses that the store still has of the old one.
    """
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


_attaches: Counter[tuple[int, ...]] = Counter()  # by ranks: how often all of them have attached, so that keys differ


def _check_same_everywhere(transport: Transport, config: int, device: torch.device) -> None:
    """A different model or setting on one rank is found here, by name of the rank, not as a hang in the first step."""
    mine = torch.tensor(list(config.to_bytes(8, "little")), dtype=torch.uint8, device=device)
    gathered = transport.start(AllGather(mine), Tag()).wait()
    words = [int.from_bytes(bytes(one.tolist()), "little") for one in gathered]
    usual, count = Counter(words).most_common(1)[0]  # of equally common ones the first, which is rank 0's
    for rank, word in enumerate(words):
        if word != usual:
            expected = f"{usual:016x} as on {count} of {len(words)} ranks"
            raise DesyncError("model or setting", rank=rank, got=f"{word:016x}", expected=expected)
