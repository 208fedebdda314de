"""The model as each mode trains it: alone (the floor), in DDP with or without a hook of torch, or attached to thinwire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.comm import Throttled, TorchDistTransport
from thinwire.demo.ddp_hooks import wrap_in_ddp
from thinwire.demo.model import build_model
from thinwire.demo.settings import Contestant
from thinwire.plan import Plan, Pricer

INTERFACE_TABLE = Path("/proc/self/net/dev")  # of the process's own network namespace, unlike /sys without a remount
SENT_BYTES_COLUMN = 8
THINWIRE_SECONDS = ("wait_s", "encode_s", "wire_s", "decode_s")


def interface_sent_bytes(table: str) -> int:
    """Sum what all interfaces but loopback have sent, out of the text of ``/proc/net/dev``."""
    rows = (line.split(":", 1) for line in table.splitlines() if ":" in line)
    return sum(int(columns.split()[SENT_BYTES_COLUMN]) for name, columns in rows if name.strip() != "lo")


@dataclass(frozen=True)
class Contender:
    """A model, what wraps it for training, its optimizer, and the meters of its communication."""

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    wire: thinwire.Attached | None
    emulated: bool

    @property
    def sent_bytes_from(self) -> str:
        """Where ``sent_bytes`` comes from; on an emulated network all hosts share the interfaces of one machine."""
        return "thinwire's own count" if self.emulated else "interface counters"

    def counters(self) -> dict[str, float]:
        """Totals since the start: bytes sent by this host and, with thinwire, where its seconds went."""
        stats = None if self.wire is None else self.wire.stats()
        wire_bytes = 0 if stats is None else stats.wire_bytes
        totals: dict[str, float] = {
            "sent_bytes": wire_bytes if self.emulated else interface_sent_bytes(INTERFACE_TABLE.read_text())
        }
        if stats is not None:
            totals["wire_bytes"] = wire_bytes
            totals |= {name: getattr(stats, name) for name in THINWIRE_SECONDS}
        return totals

    @property
    def plan(self) -> Plan | None:
        """What ``compress="auto"`` has chosen, once it has."""
        return None if self.wire is None else self.wire.plan

    @property
    def pricer(self) -> Pricer | None:
        """What that choice was made from; on rank 0."""
        return None if self.wire is None else self.wire.pricer

    def explain(self) -> str:
        """What thinwire does here, in its own words; empty for the others."""
        return "" if self.wire is None else self.wire.explain()


@contextmanager
def make_contender(contestant: Contestant, timeout_s: float) -> Iterator[Contender]:
    """Build the contestant's model under the current process group; its hooks are gone afterwards."""
    workload = contestant.workload
    model = build_model(workload.model, workload.seq, workload.seed)
    # With thinwire its own AdamW: the same as torch's where everything arrives, and aware of ages where it does not.
    adamw = thinwire.optim.AdamW if contestant.mode == "thinwire" else torch.optim.AdamW
    optimizer = adamw(model.parameters(), lr=workload.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if contestant.mode == "thinwire":
        with _attach(model, optimizer, contestant, timeout_s) as wire:
            yield Contender(model, model, optimizer, wire, contestant.emulated)
    else:
        module = model if contestant.mode == "floor" else wrap_in_ddp(model, contestant)
        yield Contender(model, module, optimizer, None, contestant.emulated)


def _attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, contestant: Contestant, timeout_s: float
) -> thinwire.Attached:
    """Attach thinwire, over a throttled transport where the network is emulated."""
    transport = None
    if contestant.emulated and contestant.bits_per_s is not None:
        assert dist.group.WORLD is not None
        transport = Throttled(TorchDistTransport(dist.group.WORLD), contestant.bits_per_s)
    return thinwire.attach(
        model, optimizer, compress=contestant.compress, fuse=contestant.fuse, transport=transport, timeout_s=timeout_s
    )
