"""Who takes part, on which models and networks."""

from __future__ import annotations

from thinwire.demo.settings import Contestant, Mode, Workload
from thinwire.lab import parse_rate

FLOOR, STOCK_DDP, AUTO = "floor", "stock DDP", "thinwire auto"
SAFE_SPECS = ("dense", "bf16", "int8", "int4")  # the quality class of ``auto``: what it may choose by default
FIXED_SPECS = (*SAFE_SPECS, "topk(density=0.01)")
RATES = ("20mbit", "50mbit", "100mbit", "200mbit", "500mbit", "1gbit", "unshaped")
MODELS = ("small", "lstm", "cnn")
QUICK_RATES, QUICK_MODELS = ("50mbit", "1gbit"), ("tiny",)
_BATCHES = {"cnn": 32, "tiny": 4}  # windows per host; steps of the small models would otherwise take a few milliseconds

_PEERS: dict[str, Mode] = {
    FLOOR: "floor",
    STOCK_DDP: "ddp",
    "DDP fp16 hook": "ddp_fp16",
    "DDP PowerSGD hook": "ddp_powersgd",
}


def ours(spec: str) -> str:
    """The name of a thinwire contestant."""
    return f"thinwire {spec}"


def workload_of(model: str) -> Workload:
    """What is trained in the cells of a model."""
    plain = Workload(model=model)
    return Workload(model=model, batch=_BATCHES.get(model, plain.batch))


def line_up(workload: Workload, rate: str) -> tuple[Contestant, ...]:
    """All contestants of one cell. ``auto`` comes last: it measures when everybody else is warm."""
    bits_per_s = parse_rate(rate)

    def contestant(name: str, mode: Mode, spec: str = "auto") -> Contestant:
        return Contestant(
            name=name, label=name, mode=mode, workload=workload, compress=spec, network=rate, bits_per_s=bits_per_s
        )

    peers = [contestant(name, mode) for name, mode in _PEERS.items()]
    fixed = [contestant(ours(spec), "thinwire", spec) for spec in FIXED_SPECS]
    return (*peers, *fixed, contestant(AUTO, "thinwire"))
