"""Layer selection by a hypernetwork, after the idea published at ICANN'24; formulas our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core import ELEMENTWISE, Compressor, Layout, Role, State, Step, UnitSpec, make, register
from thinwire.core.part import Part
from thinwire.wrappers import gate_network as network
from thinwire.wrappers.gate_network import EMBEDDING, NETWORK, ROW, Situation
from thinwire.wrappers.layers import Layers
from thinwire.wrappers.selection import SAME_EVERYWHERE, LayerSelection, layer_norms

_NUMBERS = 5  # per layer: ‖g+e‖, ‖g‖, ‖w‖, cos(g, m), usefulness
_SMOOTHING = 0.9
_UNKNOWN = -1e30
_ROW = Layout(lambda tensor: ROW, Role.REPLICATED)
_ROWS = ("net_weight", "net_first", "net_second")


@register("hypernet")
@dataclass(frozen=True, kw_only=True)
class HyperNet(LayerSelection):
    """A small network learns during training which layers are worth their bytes; the others wait.

    From the paper's abstract: a small hypernetwork picks the layers to send, its objective learns their importance, and it
    composes with quantisation and sparsification of the picked layers. Its formulas are not public; everything below is
    this project's reconstruction, and no result of the paper is claimed for it. In particular the paper has one network
    per node, this one network that is trained alike on all ranks, so that they agree.

    Per layer: log‖g+e‖, log‖g‖, log‖w‖, cos(g, m), age / max_age, log(byte share), depth and the slope of log‖g‖, z-scored
    over the layers, where m is the smoothed mean gradient. A loss slope, which is the same for all layers, would vanish in
    the z-score. Network and objective are those of ``gate_network.py``, with u = max(0, ⟨m, g+e⟩); one step of Adam per
    training step. Layers go by p / sqrt(byte share). See ``LayerSelection`` in ``selection.py`` for the rest.

    The network is stored with every tensor (7 KiB), and m takes four bytes per element. All ranks must round alike: run
    them on the same kind of processor with the same torch, or use ``normgreedy``.

    Args:
        budget: fraction of the bytes that may be sent. Lower: fewer bytes, older updates.
        warmup: in the first so many steps all layers go; over as many again the budget falls to its value. 0: none.
        max_age: a layer that has waited for so many steps goes in any case.
        always_bytes: tensors smaller than this always go.
        merge_bytes: neighbours are merged to layers of this size.
    """

    @property
    def needs_weights(self) -> bool:
        return True

    def extra_state(self, unit: UnitSpec) -> State:
        count, device = len(unit.tensors), unit.device
        rows = [network.initial_row(tensor.fqn) for tensor in unit.tensors]
        zeros = torch.zeros(count * ROW, device=device)
        return {
            "net_weight": torch.cat(rows).to(device) if rows else zeros,
            "net_first": zeros,
            "net_second": zeros.clone(),
            "net_steps": torch.zeros(count, dtype=torch.int64, device=device),
            "layer_norm": torch.full((count,), _UNKNOWN, dtype=torch.float64, device=device),
            "layer_mean": torch.zeros(unit.numel, device=device),
        }

    def extra_layout(self) -> Mapping[str, Layout]:
        return {
            **dict.fromkeys(_ROWS, _ROW),
            "net_steps": SAME_EVERYWHERE,
            "layer_norm": SAME_EVERYWHERE,
            "layer_mean": replace(ELEMENTWISE, role=Role.REPLICATED),
        }

    def numbers(self, x: Tensor, layers: Layers, state: State, step: Step) -> Tensor | None:
        if not layers.count:
            return None
        unit, smoothed = step.unit, state["layer_mean"]
        compensated = x + state[self.residual_name]
        norms = [layer_norms(one, unit, layers) for one in (compensated, x, smoothed)]
        weights = torch.zeros_like(norms[0]) if step.weights is None else layer_norms(step.weights(), unit, layers)
        along = _products(x, smoothed, unit, layers) / (norms[1] * norms[2]).clamp_min(1e-300)
        useful = _products(compensated, smoothed, unit, layers)
        # Shares, not sums: they stay in the range of fp32 whatever the gradients are.
        useful = useful / useful.abs().sum().clamp_min(1e-300)
        return torch.stack([norms[0], norms[1], weights, along, useful]).float().view(-1)

    def after_mean(self, mean: Tensor, picked: Part, state: State) -> State:
        if not picked.members:
            return {"layer_mean": state["layer_mean"]}
        old = picked.take(state["layer_mean"])
        new = old * _SMOOTHING + picked.take(mean) * (1 - _SMOOTHING)
        return {"layer_mean": picked.put(new, state["layer_mean"].clone())}

    def rank_layers(
        self, agreed: Tensor | None, layers: Layers, ages: Sequence[int], state: State, step: Step
    ) -> tuple[list[float], State]:
        if agreed is None:
            return [], {key: state[key] for key in self.extra_layout() if key != "layer_mean"}
        numbers = agreed.double().cpu().view(_NUMBERS, layers.count)
        firsts = [tensors[0] for tensors in layers.members]
        before = state["layer_norm"].cpu()[firsts]
        log_norm = numbers[1].clamp_min(1e-38).log()
        slope = torch.where(before == _UNKNOWN, 0.0, log_norm - before)
        situation = self._situation(numbers, slope, layers, ages, step.index + 1)
        p, trained = _train(state, firsts, situation)
        smoothed = torch.where(before == _UNKNOWN, log_norm, log_norm - _SMOOTHING * slope)
        trained["layer_norm"] = torch.tensor(layers.spread(smoothed.tolist()), dtype=torch.float64)
        priorities = [gate / share**0.5 for gate, share in zip(p.tolist(), layers.shares, strict=True)]
        return priorities, {key: value.to(state[key].device) for key, value in trained.items()}

    def _situation(self, numbers: Tensor, slope: Tensor, layers: Layers, ages: Sequence[int], index: int) -> Situation:
        shares = torch.tensor(layers.shares, dtype=torch.float64)
        waited = torch.tensor(ages, dtype=torch.float64) / self.max_age
        depth = torch.linspace(0, 1, layers.count, dtype=torch.float64)
        logs = numbers[:3].clamp_min(1e-38).log()
        features = torch.stack([*logs, numbers[3], waited, shares.log(), depth, slope], dim=1)
        useful = numbers[4].clamp_min(0)
        return Situation(
            _z_scored(features), useful / useful.sum().clamp_min(1e-300), shares, waited, self._budget(index)
        )

    def numbers_bytes(self, layers: Layers, world_size: int) -> int:
        return 2 * (world_size - 1) * torch.float32.itemsize * _NUMBERS * layers.count // world_size

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(budget=0.3, warmup=1, always_bytes=0, merge_bytes=0, inner=make("topk(density=0.1)"))]


def _products(one: Tensor, other: Tensor, unit: UnitSpec, layers: Layers) -> Tensor:
    """The inner product of every layer, fp64."""
    by_tensor = [
        torch.dot(a.double(), b.double()) for a, b in zip(one.split(unit.sizes), other.split(unit.sizes), strict=True)
    ]
    return torch.stack([torch.stack([by_tensor[tensor] for tensor in tensors]).sum() for tensors in layers.members])


def _z_scored(features: Tensor) -> Tensor:
    centred = features - features.mean(dim=0)
    return centred / centred.square().mean(dim=0).sqrt().clamp_min(1e-6)


def _train(state: State, firsts: Sequence[int], situation: Situation) -> tuple[Tensor, State]:
    """One step of training; p of every layer, and the rows with the new network.

    Every tensor holds a copy of the network, so that it follows its tensor into other groups. Where copies differ, after a
    regrouping or because a tensor was not used in a step, the one that was trained longest is taken. A layer's embedding
    is that of its first tensor.
    """
    rows = [state[key].cpu().view(-1, ROW) for key in _ROWS]
    counts = state["net_steps"].cpu()
    best = int(counts.argmax())
    steps = int(counts[best])
    shared = [row[best, :NETWORK].double() for row in rows]
    own = [row[firsts, NETWORK:].double() for row in rows]
    p, by_network, by_embedding = network.gradients(shared[0], own[0], situation)
    shared_after = network.adam(shared[0], by_network, shared[1], shared[2], steps)
    own_after = network.adam(own[0], by_embedding, own[1], own[2], steps)
    after: State = {"net_steps": torch.full_like(counts, steps + 1)}
    for key, row, one, embeddings in zip(_ROWS, rows, shared_after, own_after, strict=True):
        new = row.clone()
        new[:, :NETWORK] = one.float()
        new[firsts, NETWORK:] = embeddings.float()
        after[key] = new.view(-1)
    assert by_embedding.shape[1] == EMBEDDING
    return p, after
