"""Come and go: other formats in, other formats out.

Plain safetensors files hold weights only. Directories of ``torch.distributed.checkpoint`` hold weights and optimizers; their
metadata is a pickle, which runs code when it is read: reading one asks for ``trust=True``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from thinwire.checkpoint import scan
from thinwire.checkpoint.blobs import views
from thinwire.checkpoint.files import LocalFiles
from thinwire.checkpoint.load import Reader
from thinwire.checkpoint.sealed import Damaged
from thinwire.checkpoint.snapshot import fill, layout_of
from thinwire.checkpoint.state import bare
from thinwire.checkpoint.tensors import read_header
from thinwire.core import CheckpointError

StrPath = str | os.PathLike[str]


def export_safetensors(directory: StrPath, path: StrPath, step: int | None = None) -> int:
    """Write the weights and buffers of a checkpoint to one safetensors file; returns its step.

    Args:
        step: default: the newest that is whole.
    """
    found, replicated, local = _read(directory, step)
    tensors = {**replicated["model"], **{k: v for k, v in local["buffers"].items() if isinstance(v, Tensor)}}
    tensors = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in tensors.items()}
    layout = layout_of(tensors, {"format": "pt", "thinwire_step": str(found)})
    data = bytearray(layout.total_bytes)
    data[: len(layout.header)] = layout.header
    fill(memoryview(data), layout, tensors)
    temporary = Path(path).with_name(Path(path).name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return found


def import_safetensors(path: StrPath, model: nn.Module, *, strict: bool = True) -> None:
    """Load weights and buffers from a safetensors file. Its header is validated first; nothing in it is executed.

    Raises:
        CheckpointError: the file is damaged, or of another model. Nothing has changed then.
    """
    data = bytearray(Path(path).read_bytes())
    try:
        entries, _ = read_header(data, len(data), str(path))
    except Damaged as damage:
        raise CheckpointError(f"{damage}; get the file again") from damage
    module, state = bare(model), views(memoryview(data), entries)
    own = module.state_dict()
    # Tied weights are in a file once, under one of their names.
    missing = [name for name in own if name not in state and not _is_tied(module, name, state)]
    wrong = [name for name, t in state.items() if name in own and own[name].shape != t.shape]
    unexpected = [name for name in state if name not in own]
    if wrong or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"{path} is of another model: missing {missing[:5]}, unexpected {unexpected[:5]}, other shapes {wrong[:5]}; "
            "build the model as it was, or use strict=False for missing and unexpected names"
        )
    module.load_state_dict(state, strict=False)


def export_dcp(
    directory: StrPath, target: StrPath, model: nn.Module, optimizer: torch.optim.Optimizer, step: int | None = None
) -> int:
    """Load a checkpoint into model and optimizer, and save both as ``torch.distributed.checkpoint``; returns its step.

    Under ``app["model"]`` and ``app["optimizer"]``, as torch's ``get_state_dict`` names things.
    """
    from thinwire.checkpoint.state import TrainingState

    found, replicated, local = _read(directory, step)
    state = TrainingState(model, optimizer, None, {}, rng=False)
    state.check(replicated, {**local, "extra": {}})
    state.apply(replicated, {"buffers": local["buffers"], "extra": {}})
    weights, moments = get_state_dict(bare(model), optimizer)
    save_dcp({"model": weights, "optimizer": moments}, checkpoint_id=target, no_dist=True)
    return found


def import_dcp(source: StrPath, model: nn.Module, optimizer: torch.optim.Optimizer, *, trust: bool = False) -> None:
    """Load model and optimizer from a directory that ``export_dcp``, or torch with the same names, has written.

    Args:
        trust: you know who wrote it. Reading its metadata runs pickle, which can execute anything.
    """
    if not trust:
        raise CheckpointError(
            f"{source} is a torch.distributed.checkpoint, whose metadata is a pickle: reading it can execute code. Pass "
            "trust=True if you know who wrote it"
        )
    module = bare(model)
    weights, moments = get_state_dict(module, optimizer)
    wanted: dict[str, Any] = {"model": weights, "optimizer": moments}
    load_dcp(wanted, checkpoint_id=source, no_dist=True)
    set_state_dict(module, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])


def _read(directory: StrPath, step: int | None) -> tuple[int, Any, Any]:
    files = LocalFiles(directory)
    for found in scan.fulls(files) if step is None else [step]:
        try:
            return found, *Reader().load(files, scan.read_manifest(files, found), 0)
        except Damaged as damage:
            if step is not None:
                raise CheckpointError(f"step {step} cannot be read: {damage}") from damage
    raise CheckpointError(f"{directory} has no checkpoint that is whole; see: thinwire checkpoint verify {directory}")


def _is_tied(module: nn.Module, name: str, state: dict[str, Tensor]) -> bool:
    own = module.state_dict()
    return any(own[name].data_ptr() == own[other].data_ptr() for other in state if other in own)
