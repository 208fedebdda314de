"""Zones of equal gradient scale in an autograd graph, and the gates between them.

A layer has a gate at its output and one at its input; each multiplies the gradient that passes. Cutting the graph at the
gates leaves *zones*: inside one, whatever is joined (a residual sum, a tensor used twice, a shared weight) is connected,
so all of it has one scale by construction. A chain of layers carries its scale on towards the input; a residual branch
multiplies on entering and divides on leaving, because both its ends are in the zone of the stream. Nothing has to be
declared: the graph that a loss is about to go back through is looked at each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, log2
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from thinwire.amp.layer_moments import LayerRange

_GATE, _SHARES = "thinwire_gate", "thinwire_shares"
OnGradient = Callable[[Tensor, float], None]
OnParameter = Callable[[Tensor, Tensor, float], None]


@dataclass(eq=False)
class Gate:
    """Multiplies the gradient that passes by ``factor``; ``measure`` first sees it, with the scale it arrives in."""

    factor: float = 1.0
    arriving_scale: float = 1.0
    measure: OnGradient | None = None

    def place_on(self, tensor: Tensor) -> None:
        """Put the gate where the gradient of ``tensor`` arrives."""
        assert tensor.grad_fn is not None
        _metadata(tensor.grad_fn)[_GATE] = self
        tensor.register_hook(self._pass)

    def place_behind(self, output: Tensor) -> None:
        """Put the gate where the gradient of a layer's ``output`` arrives, even if it is going to be changed in place.

        An operation in place on a view (a ReLU after a linear layer) replaces the node of the view, but not of its base.
        """
        base = output._base if output._is_view() else None
        self.place_on(output if base is None or base.grad_fn is None else base)

    def _pass(self, gradient: Tensor) -> Tensor | None:
        if self.measure is not None:
            self.measure(gradient, self.arriving_scale)
        return None if self.factor == 1.0 else gradient * self.factor


@dataclass(eq=False)
class Call:
    """One call of a layer: its gates, and its place in the order of calls."""

    layer: str
    order: int
    output: Gate = field(default_factory=Gate)
    input: Gate | None = None


class _Graph:
    """Nodes reachable from a loss; node i has the sides 2i (gradients arrive) and 2i + 1 (gradients leave)."""

    def __init__(self, roots: Iterable[Node]) -> None:
        self.numbers: dict[Node, int] = {}
        self.gates: dict[Gate, int] = {}
        self.leaves: list[tuple[Node, int, Node]] = []  # who hands which of its gradients to which parameter
        self._parent: list[int] = []
        waiting = [root for root in roots if self._add(root)]
        while waiting:
            node = waiting.pop()
            side = 2 * self.numbers[node] + 1
            for index, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                if self._add(child):
                    waiting.append(child)
                self._join(side, 2 * self.numbers[child])
                if hasattr(child, "variable"):
                    self.leaves.append((node, index, child))

    def _add(self, node: Node) -> bool:
        if node in self.numbers:
            return False
        number = self.numbers[node] = len(self.numbers)
        self._parent += [2 * number, 2 * number + 1]
        gate = _metadata(node).get(_GATE)
        if gate is None:
            self._join(2 * number, 2 * number + 1)
        else:
            self.gates[gate] = number
        return True

    def zone(self, side: int) -> int:
        parent = self._parent
        while parent[side] != side:
            parent[side] = parent[parent[side]]
            side = parent[side]
        return side

    def _join(self, one: int, other: int) -> None:
        self._parent[self.zone(one)] = self.zone(other)

    def open(self, gates: Iterable[Gate]) -> None:
        """Let these gates pass everything: what they separated is one zone again."""
        for gate in gates:
            gate.factor = 1.0
            number = self.gates.pop(gate)
            self._join(2 * number, 2 * number + 1)

    def before(self, gate: Gate) -> int:
        """The zone that gradients come from."""
        return self.zone(2 * self.gates[gate])

    def behind(self, gate: Gate) -> int:
        """The zone that gradients go to."""
        return self.zone(2 * self.gates[gate] + 1)


def set_scales(
    roots: Iterable[Node],
    calls: Iterable[Call],
    ranges: Mapping[str, LayerRange],
    global_scale: float,
    on_parameter: OnParameter | None = None,
) -> tuple[dict[str, float], set[str]]:
    """Set the factors of all gates between ``roots`` and the parameters; parameters get back what was multiplied in.

    Args:
        calls: of layers, of this graph or others; others are passed over.
        ranges: total scales that suit the layers; unknown ones are left alone.
        global_scale: what the loss itself is going to be multiplied with.
        on_parameter: called in backward with each parameter, its gradient and the global scale that is still in it.

    Returns:
        For each layer the scale, besides the global one, in which its gradients are computed, and the layers whose gates
        really multiply: without the others, everything would be the same.
    """
    roots = list(roots)
    graph = _Graph(roots)
    found = sorted((c for c in calls if c.output in graph.gates), key=lambda c: c.order, reverse=True)
    # A layer whose output gate has got lost would scale only half; so would a call that is no longer known.
    known = {gate for call in found for gate in (call.output, call.input)}
    graph.open([gate for gate in graph.gates if gate not in known])
    scales = _zone_scales(graph, roots, found, ranges, global_scale)
    for call in found:
        for gate in (call.output, call.input):
            if gate is not None and gate in graph.gates:
                gate.arriving_scale = scales.get(graph.before(gate), 1.0) * global_scale
                gate.factor = scales.get(graph.behind(gate), 1.0) / scales.get(graph.before(gate), 1.0)
    for node, index, leaf in graph.leaves:
        scale = scales.get(graph.zone(2 * graph.numbers[leaf]), 1.0)
        share = _Share(leaf.variable, scale, global_scale, on_parameter)  # type: ignore[attr-defined]
        _give_back(node, index, share)
    at_work = {
        call.layer for call in found if any(g is not None and g.factor != 1.0 for g in (call.output, call.input))
    }
    return {call.layer: scales[graph.behind(call.output)] for call in found}, at_work


def _zone_scales(
    graph: _Graph, roots: list[Node], calls: list[Call], ranges: Mapping[str, LayerRange], global_scale: float
) -> dict[int, float]:
    """Scales by zone. The zones of the losses have 1; from there, layer by layer, in the order of backward."""
    scales = {graph.zone(2 * graph.numbers[root]): 1.0 for root in roots}
    settled = set(scales)
    arriving = _arriving(graph, calls, ranges)
    for call in calls:
        outer, inner = graph.before(call.output), graph.behind(call.output)
        made = ranges.get(call.layer, LayerRange()).made
        settled.add(outer)
        if inner not in settled:
            outside = scales.setdefault(outer, 1.0)
            scales[inner] = max(outside, _power_of_two(made.wanted / global_scale))
            settled.add(inner)
        if call.input is not None and call.input in graph.gates:
            beyond = graph.behind(call.input)
            if beyond not in settled:
                need, cap = arriving.get(beyond, (0.0, inf))
                wanted = max(scales[inner], _power_of_two(min(need, cap) / global_scale))
                scales[beyond] = min(scales.get(beyond, inf), wanted)
    return scales


def _arriving(graph: _Graph, calls: Iterable[Call], ranges: Mapping[str, LayerRange]) -> dict[int, tuple[float, float]]:
    """By zone, the total scale that its gradients need on their way to the layers they arrive at, and may have at most."""
    found: dict[int, tuple[float, float]] = {}
    for call in calls:
        zone, suits = graph.before(call.output), ranges.get(call.layer, LayerRange()).arriving
        need, cap = found.get(zone, (0.0, inf))
        found[zone] = max(need, suits.need), min(cap, suits.cap)
    return found


@dataclass(frozen=True)
class _Share:
    """What is done to the gradient that one node hands to one parameter."""

    parameter: Tensor
    scale: float
    global_scale: float
    on_parameter: OnParameter | None

    def taken(self, gradient: Tensor) -> Tensor:
        """The gradient without the layers' scale. Parameters are fp32, so this never rounds into fp16."""
        unscaled = gradient if self.scale == 1.0 else gradient / self.scale
        if self.on_parameter is not None:
            self.on_parameter(self.parameter, unscaled, self.global_scale)
        return unscaled


def _give_back(node: Node, index: int, share: _Share) -> None:
    """Let ``node`` hand its gradient ``index`` on as ``share`` says; the last call counts."""
    shares: dict[int, _Share] = _metadata(node).setdefault(_SHARES, {})
    idle = share.scale == 1.0 and share.on_parameter is None
    if idle and not shares:
        return

    def after(gradients: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            shares[i].taken(gradient) if i in shares and gradient is not None else gradient
            for i, gradient in enumerate(gradients)
        )

    if not shares:
        node.register_hook(after)
    shares[index] = share


def _metadata(node: Node) -> dict[str, Any]:
    """A dictionary that lives as long as the node (torch's stub takes the property for a method)."""
    return node.metadata  # type: ignore[return-value]


def _power_of_two(x: float) -> float:
    """The largest power of two that is not above ``x``, kept within what fp16 gradients can need."""
    return 2.0 ** int(min(log2(x), 60.0) // 1) if x > 2.0**-60 else 2.0**-60
