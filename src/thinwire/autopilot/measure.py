"""What the autopilot measures between two steps: the network with all ranks, the compressors on rank 0 alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.comm.link import Link
from thinwire.core import TensorSpec
from thinwire.plan.cluster import Cluster, usable_cores
from thinwire.plan.codecs import SIDES, CodecCost, measure_codec, relative_error
from thinwire.plan.collectives import Kind
from thinwire.plan.network import Network
from thinwire.plan.probe import holds, measure_network

# Quicker than a probe: training pauses meanwhile.
_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all")  # what the candidates use
_LARGEST_BYTES = 16 << 20
_PATIENCE_S = 0.12  # so 1 MB at 20 Mbit/s: TCP on a slow link carries long messages less well than short ones
_REPEATS = 15
_FEWEST_REPEATS = 1  # of messages so slow that little can disturb them; one more goes before
_SECONDS_PER_SIZE = 0.06
_SMALLEST_SIDE = 256
_SAMPLED_TENSORS = 60
_SAMPLED_ELEMS = 1 << 16


def link_network(link: Link, tensors: Sequence[TensorSpec]) -> Network:
    """The curves of a link, the same on all ranks; all call it at the same point, while the link is idle."""
    with link.idle() as transport:
        return measure_network(
            transport,
            kinds=_KINDS,
            largest_bytes=min(4 * sum(tensor.numel for tensor in tensors), _LARGEST_BYTES),
            patience_s=_PATIENCE_S,
            repeats=_REPEATS,
            fewest_repeats=_FEWEST_REPEATS,
            seconds_per_size=_SECONDS_PER_SIZE,
            device=link.device,
        )


def still_holds(network: Network, link: Link) -> bool:
    """Whether the link is as it was measured; the same answer on all ranks."""
    with link.idle() as transport:
        return holds(network, transport, link.device)


def cluster_of(link: Link, machines: Sequence[str]) -> Cluster:
    """Ranks and cores, given the machine of every rank."""
    # Accelerators compute alone; the threads of the processor are then free for communication.
    threads = torch.get_num_threads() if link.device.type == "cpu" else 1
    most = max(Counter(machines).values())
    return Cluster(world_size=len(machines), ranks_per_machine=most, cores=usable_cores(), threads=threads)


def codec_costs(specs: Sequence[str], tensors: Sequence[TensorSpec]) -> Mapping[str, CodecCost]:
    """What the compressors cost here, on matrices up to about the size of the model."""
    elems = max(_SMALLEST_SIDE**2, sum(tensor.numel for tensor in tensors))
    sides = tuple(side for side in SIDES if side**2 <= elems)
    return {spec: _codec_cost(spec, sides, torch.get_num_threads()) for spec in specs}


def gradient_errors(specs: Sequence[str], gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """By spec and name, ‖g - C(g)‖² / ‖g‖² of gradients: of some rows of some tensors, and their mean for all others."""
    chosen = dict(list(gradients.items())[:: max(1, len(gradients) // _SAMPLED_TENSORS)])
    samples = {name: _some_rows(gradient) for name, gradient in chosen.items()}
    return {spec: _errors(spec, samples, gradients) for spec in specs}


def _errors(spec: str, samples: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, float]:
    errors = {name: relative_error(spec, g, TensorSpec(name, tuple(g.shape))) for name, g in samples.items()}
    sizes = {name: float(g.square().sum()) for name, g in samples.items()}
    usual = sum(errors[name] * size for name, size in sizes.items()) / max(sum(sizes.values()), 1e-30)
    return {name: errors.get(name, usual) for name in names}


def _some_rows(gradient: Tensor) -> Tensor:
    """About as many rows, spread over all, as make the sample of a tensor."""
    if gradient.dim() < 2:
        return gradient.float().cpu()
    return gradient[:: max(1, gradient.numel() // _SAMPLED_ELEMS)].float().cpu()


@lru_cache
def _codec_cost(spec: str, sides: tuple[int, ...], threads: int) -> CodecCost:
    """Once per process: later plans, and those of other wires, need the same."""
    return measure_codec(spec, sides)
