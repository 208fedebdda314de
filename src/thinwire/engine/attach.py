"""``attach``: one line that puts thinwire between a model and its gradients."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm import GLOO_LANES, Tag, TorchDistTransport, Transport
from thinwire.core import AllGather, Compressor, ConfigError, DesyncError, TensorSpec
from thinwire.engine.attached import Attached
from thinwire.engine.autopilot import Autopilot, AutoSettings
from thinwire.engine.ddp import DDPEngine
from thinwire.engine.group_queue import Steering
from thinwire.engine.groups import fingerprint
from thinwire.engine.plain import PlainEngine
from thinwire.engine.received import reads_ages, warn_if_blind
from thinwire.engine.recording import Recorder
from thinwire.engine.regroup import Regrouping
from thinwire.engine.session import GradScaler, Session
from thinwire.fusion import parse_fusion
from thinwire.fusion.prepare import prepare
from thinwire.plan.online import AUTO_FUSIONS, auto_specs
from thinwire.plan.price import DENSE
from thinwire.plan.result import Plan
from thinwire.plan.search import Budget, Quality


def attach(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compress: str | Compressor = "auto",
    fuse: str = "auto",
    sync: str = "every_step",
    plan: Plan | None = None,
    quality: Quality = "safe",
    scaler: GradScaler | None = None,
    broadcast_buffers: bool = True,
    transport: Transport | None = None,
    events: str | Path | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> Attached:
    """Average the gradients of ``module`` over all ranks, compressed, while backward runs.

    Works on a plain module (do not wrap it in DDP then) and on a ``DistributedDataParallel`` module. The process group must
    be initialised. All ranks call it at the same point with the same arguments.

    Args:
        optimizer: the optimizer of these parameters. With it, a step in which any rank has a NaN or Inf gradient is
            skipped on all ranks; without it such a step leaves NaN gradients, as plain DDP does.
        compress: what each gradient sends, for example ``"topk(density=0.01) | fp16"``; see ``thinwire.available()``.
            ``"auto"``: eight to eighteen dense steps are measured, then the network and the candidates, for a few seconds;
            all ranks then change to what is predicted to be fastest, or stay dense where nothing is faster by more than
            3 %. ``wire.plan`` says what and why. Steps that come to take longer or shorter are noticed, and the plan is
            made anew.
        fuse: which gradients travel together: ``"auto"``, ``"none"``, a size such as ``"2MiB"``, or a planner that measures
            first: ``"safusion"``, ``"ssfusion"``, ``"optimal"``. With ``compress="auto"``, ``"auto"`` is planned too.
        sync: when workers synchronise; ``"every_step"`` is the only policy so far.
        plan: a plan made elsewhere (``thinwire plan --json``, read by ``thinwire.plan.Plan.load``): its compressor and
            fusion are used from the first step on, instead of ``compress="auto"``.
        quality: what ``"auto"`` may choose: ``"exact"`` dense and 16 bits, ``"safe"`` few bits too, ``"fast"`` also a
            sparsifier, if the optimizer knows how old updates are (``thinwire.optim``).
        scaler: the ``torch.amp.GradScaler`` in use, so that residuals survive changes of its scale.
        broadcast_buffers: plain modules only: share rank 0's buffers before each training forward, as DDP does.
        transport: who carries the messages; default: a process group of its own over all ranks.
        events: a directory for one JSONL file of events per rank, to be read by ``thinwire report``.
        seed: seed of random choices such as random-k.
        timeout_s: how long a rank may lag behind before the others give up.

    Raises:
        ConfigError: something does not exist or does not fit; the message says what to do.
        DesyncError: the ranks have attached different models or settings.
    """
    if sync != "every_step":
        raise ConfigError(f"sync is {sync!r}; the only policy so far is 'every_step'")
    if plan is not None:
        compress, fuse = _planned(plan, compress, fuse)
    auto = compress == "auto"
    settings = _auto_settings(fuse, quality, optimizer)
    module = _unwrapped(module)
    compressor, planner = prepare(DENSE if auto else compress), parse_fusion(fuse)
    parameters = _trainable(module)
    tensors = [TensorSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]
    if transport is None:
        transport = _own_transport(module, timeout_s, tensors[0].device)
    wanted = f"auto {quality}" if auto else str(compressor)
    config = fingerprint(tensors, wanted, fuse, str(seed), str(broadcast_buffers), str(scaler is None))
    _check_same_everywhere(transport, config, tensors[0].device)
    session = Session(
        transport, parameters, tensors, compressor, config=config, seed=seed, scaler=scaler, optimizer=optimizer
    )

    try:
        # Gradients become ready roughly in reverse order of registration.
        regrouping = Regrouping(planner, tensors[::-1], session)
        autopilot = Autopilot(regrouping, session, tensors, settings) if auto else None
        engine = _engine(module, parameters, autopilot or regrouping, session, broadcast_buffers)
    except BaseException:
        session.close()
        raise
    if optimizer is not None and transport.rank == 0:
        warn_if_blind(optimizer, session.ages)
    wire = Attached(engine, session, regrouping, autopilot, tensors, optimizer)
    if events is not None:
        chosen = "auto" if auto else str(compressor)
        session.meter.recorder = _recorder(Path(events), transport, chosen, wire.explain())
    return wire


def _recorder(directory: Path, transport: Transport, compress: str, explanation: str) -> Recorder:
    rank, world_size = transport.rank, transport.world_size
    return Recorder(directory, rank=rank, world_size=world_size, compress=compress, explanation=explanation)


def _engine(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    steering: Steering,
    session: Session,
    broadcast_buffers: bool,
) -> DDPEngine | PlainEngine:
    if isinstance(module, DistributedDataParallel):
        return DDPEngine(module, parameters, steering, session)
    return PlainEngine(module, parameters, steering, session, broadcast_buffers=broadcast_buffers)


def _planned(plan: Plan, compress: str | Compressor, fuse: str) -> tuple[str, str]:
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is a {type(plan).__name__}; expected a plan of the planner, such as Plan.load gives")
    if compress != "auto" or fuse != "auto":
        raise ConfigError(f"plan says {plan.compress!r}, fuse={plan.fuse!r}; leave out compress= and fuse=")
    return plan.compress, plan.fuse


def _auto_settings(fuse: str, quality: Quality, optimizer: torch.optim.Optimizer | None) -> AutoSettings:
    aware = optimizer is not None and reads_ages(optimizer)
    return AutoSettings(
        quality=Budget(quality=quality).quality,  # refuses what it does not know
        specs=auto_specs(quality, reads_ages=aware),
        fusions=AUTO_FUSIONS if fuse == "auto" else (fuse,),
        start_fuse=fuse,
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    """DDP inside torch.compile is still DDP: treated as a plain module, its gradients would be averaged twice."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, DistributedDataParallel) else module


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by clean name: wrappers such as DDP and torch.compile add prefixes that a checkpoint must not have."""
    prefix = "module." if isinstance(module, DistributedDataParallel) else ""
    parameters = {_clean(name, prefix): p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(f"{type(module).__name__} has no parameter that requires gradients; nothing to attach to")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{name} is {parameter.dtype}; only real floating-point parameters can be averaged")
    return parameters


def _clean(name: str, prefix: str) -> str:
    return ".".join(part for part in name.removeprefix(prefix).split(".") if part != "_orig_mod")


def _own_transport(module: nn.Module, timeout_s: float, device: torch.device) -> Transport:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group('gloo') (or 'nccl') first "
            "and start the script with torchrun, on one machine for example 'torchrun --nproc-per-node 2 train.py'"
        )
    ranks = dist.get_process_group_ranks(module.process_group) if isinstance(module, DistributedDataParallel) else None
    group, *later = (dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for _ in range(_lanes(device)))
    roll_call = dist.new_group(ranks, backend="gloo") if dist.is_gloo_available() else None
    return TorchDistTransport(group, roll_call, later)


def _lanes(device: torch.device) -> int:
    """gloo's process groups work side by side; NCCL's must be used in the same order on all ranks."""
    return GLOO_LANES if device.type == "cpu" and "gloo" in dist.get_backend() else 1


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
