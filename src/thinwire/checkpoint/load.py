"""Reads a checkpoint back: verified while it is read, shared out again for this rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint import scan
from thinwire.checkpoint.blobs import views
from thinwire.checkpoint.files import Files
from thinwire.checkpoint.manifest import Manifest
from thinwire.checkpoint.sealed import Damaged
from thinwire.checkpoint.snapshot import layout_of
from thinwire.checkpoint.tensors import Layout, read_header
from thinwire.checkpoint.tree import pack, unpack

REPLICATED, LOCAL = "replicated", "local"


def share_of(sizes: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """The tensors of replicated state that a rank writes: the largest first, each to the rank that has least."""
    loads, mine = [0] * world_size, []
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name]
        if lightest == rank:
            mine.append(name)
    return mine


def plan_file(
    replicated: Mapping[str, Any], local: Mapping[str, Any], rank: int, world_size: int
) -> tuple[Layout, dict[str, Tensor]]:
    """The file of one rank: its share of the replicated state, and its local state."""
    shared, own = dict[str, Tensor](), dict[str, Tensor]()
    metadata = {LOCAL: _text(pack(local, LOCAL, own))}
    tree = pack(replicated, REPLICATED, shared)
    if rank == 0:
        metadata[REPLICATED] = _text(tree)
    mine = share_of({name: tensor.nbytes for name, tensor in shared.items()}, rank, world_size)
    tensors = {**own, **{name: shared[name] for name in mine}}
    return layout_of(tensors, metadata), tensors


class Reader:
    """Reads each checkpoint once: what was verified last is what is loaded, if it is the one that ranks agree on."""

    def __init__(self) -> None:
        self._last: tuple[Manifest, dict[str, memoryview]] | None = None

    def check(self, files: Files, step: int) -> Manifest:
        """See ``scan.verify``."""
        self._last = None  # one at a time in memory
        self._last = scan.open_verified(files, step)
        return self._last[0]

    def load(self, files: Files, manifest: Manifest, rank: int) -> tuple[Any, Any]:
        """Replicated and local state. A rank that did not exist then gets rank 0's local state.

        Raises:
            Damaged: a byte is not as it was written.
        """
        if self._last is None or self._last[0] != manifest:
            self.check(files, manifest.step)
        assert self._last is not None
        return _read(*self._last, rank)


def _read(manifest: Manifest, found: Mapping[str, memoryview], rank: int) -> tuple[Any, Any]:
    tensors, metadata = dict[str, Tensor](), dict[str, dict[str, str]]()
    own = names.shard_name(rank if rank < manifest.world_size else 0)
    for name, view in found.items():
        entries, metadata[name] = read_header(view, len(view), name)
        kept = {key: entry for key, entry in entries.items() if name == own or key.startswith(REPLICATED)}
        tensors |= views(view, kept)
    trees = [metadata[names.shard_name(0)].get(REPLICATED), metadata[own].get(LOCAL)]
    try:
        replicated, local = (unpack(json.loads(tree or ""), tensors) for tree in trees)
    except ValueError as error:
        raise Damaged(f"{names.step_name(manifest.step)} cannot be read: {error}") from error
    return replicated, local


def _text(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))
