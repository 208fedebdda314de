"""Layer-wise gradient scaling: Zhao et al., Adaptive Loss Scaling for Mixed Precision Training (IJCAI'20).

One loss scale cannot suit all layers: what keeps the gradients of one from vanishing in fp16 makes those of another
overflow. ``LayerScaler`` replaces ``torch.amp.GradScaler`` and gives each layer a power of two of its own, on top of the
global dynamic scale. Beyond the paper: weight gradients are protected as well as input gradients, residual sums have
equal scale (see ``zones``), ranks agree on the moments, and a step that overflows lowers the layers' scales too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from thinwire.amp.layer_moments import N_SUMS, LayerRange, Moments, Range, layer_range, moments_of
from thinwire.amp.zones import Call, Gate, set_scales
from thinwire.core.errors import CheckpointError, ConfigError

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
Outputs = TypeVar("Outputs", Tensor, Iterable[Tensor])
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_GATED = (nn.Linear, _ConvNd, *_NORMS)
_SETTLING_STEPS = 16  # at most that many measurements in a row while they still change


class LayerScaler:
    """A ``torch.amp.GradScaler`` that also scales layer by layer.

    Use it as you would use ``GradScaler``, with fp32 parameters under fp16 autocast: ``scale(loss).backward()``,
    ``step(optimizer)``, ``update()``. After backward, gradients carry the global scale only. bf16 has the range of fp32 and
    needs none of this. Under ``torch.compile`` the layers' hooks are compiled away; use it in eager mode.

    Args:
        model: its linear and convolution layers are scaled; it may be wrapped in DDP, before or after.
        refresh: steps between measurements. Lower: follows the training more closely, at a higher cost.
        reduce: combines a tensor over the ranks, so that they agree (``thinwire.amp.distributed`` gives one).
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for ``GradScaler``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        refresh: int = 200,
        reduce: Reduce | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if refresh < 1:
            raise ConfigError(f"refresh is {refresh}; expected a number of steps, at least 1")
        self._names = {id(p): _clean(name) for name, p in model.named_parameters()}
        self._global = torch.amp.GradScaler(
            _device_type(model),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._layers = _layers(model) if enabled else {}
        self._refresh, self._reduce = refresh, reduce
        self._ranges: dict[str, LayerRange] = {}
        self._scales: dict[str, float] = {}
        self._amax: dict[str, float] = {}
        self._calls: list[Call] = []
        self._scaled: list[weakref.ref[Tensor]] = []
        self._steps, self._settling = 0, _SETTLING_STEPS
        self._backoff = 1.0
        self._at_work: set[str] = set()
        self._gated: set[str] | None = None  # the layers that get gates; None: all
        self._clear_measurements()
        # A norm in front of a branch belongs to it: without gates of its own, its weights would see the stream's scale.
        gated = {_clean(name): m for name, m in model.named_modules() if isinstance(m, _GATED)} if enabled else {}
        self._handles = [handle for name, module in gated.items() for handle in self._hook(name, module)]

    def scale(self, outputs: Outputs) -> Outputs:
        """The loss (or losses) times the global scale; sets what each layer does in the backward pass to come."""
        scaled: Outputs = self._global.scale(outputs)
        if self._calls:
            self._scaled += [weakref.ref(one) for one in ([scaled] if isinstance(scaled, Tensor) else scaled)]
            self._set_scales()
        return scaled

    def _set_scales(self) -> None:
        """For all losses that may still go back: they may share a part of the graph, or be added before they do."""
        alive = [one for one in (reference() for reference in self._scaled) if one is not None]
        roots = [one.grad_fn for one in alive if one.grad_fn is not None]
        on_parameter = self._see_parameter if self._measuring else None
        scales, at_work = set_scales(roots, self._calls, self._lowered(), self.get_scale(), on_parameter)
        self._scales |= scales
        self._at_work |= at_work

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the global scale; layers' own scales are gone from them already."""
        self._global.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, unless a gradient is not finite."""
        result: float | None = self._global.step(optimizer, *args, **kwargs)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End a step: adjust the global scale and, if this step was measured, the layers'."""
        before = self.get_scale()
        self._global.update(new_scale)
        if new_scale is None and self.get_scale() < before:
            # Lowering the global scale alone would change nothing where a layer makes up for it.
            self._backoff /= 2
        measured = self._measuring
        if measured and self._layers:
            self._take_measurements()
        self._calls, self._scaled = [], []
        self._steps += 1
        # Whatever has changed, all gates are put up once to see which of them have work to do from then on.
        changed = measured or self._measuring or self.get_scale() != before
        self._gated, self._at_work = (None if changed else self._at_work), set()

    def get_scale(self) -> float:
        """The global scale, the only one that gradients still carry after backward."""
        return float(self._global.get_scale())

    def is_enabled(self) -> bool:
        """Whether anything is scaled at all."""
        return bool(self._global.is_enabled())

    def layer_scales(self) -> dict[str, float]:
        """By layer, the scale (besides the global one) in which its gradients were computed last."""
        return dict(self._scales)

    def amax_table(self) -> dict[str, float]:
        """By parameter, the largest gradient magnitude over the ranks when last measured: what a wire scale needs."""
        return dict(self._amax)

    def detach(self) -> None:
        """Remove all hooks; the model is as it was before."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on exactly; holds only numbers, strings, lists and dicts."""
        return {
            "global": self._global.state_dict(),
            "ranges": {name: [list(each.arriving), list(each.made)] for name, each in self._ranges.items()},
            "amax": dict(self._amax),
            "steps": self._steps,
            "settling": self._settling,
            "backoff": self._backoff,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            CheckpointError: it was taken of a model with other layers. Nothing is changed then.
        """
        if unknown := sorted(set(state["ranges"]) - set(self._layers)):
            raise CheckpointError(
                f"the checkpoint has scales of the layers {', '.join(unknown)}, which this model does not have; "
                "load it into the model that it was saved with"
            )
        self._global.load_state_dict(state["global"])
        self._ranges = {name: LayerRange(*(Range(*each) for each in two)) for name, two in state["ranges"].items()}
        self._amax = dict(state["amax"])
        self._steps, self._settling, self._backoff = state["steps"], state["settling"], state["backoff"]
        self._gated = None

    @property
    def _measuring(self) -> bool:
        return self._settling > 0 or self._steps % self._refresh == 0

    def _lowered(self) -> dict[str, LayerRange]:
        if self._backoff == 1.0:
            return self._ranges
        return {name: LayerRange(*(_times(each, self._backoff) for each in two)) for name, two in self._ranges.items()}

    def _hook(self, name: str, layer: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks that put a gate before and after the layer whenever it is called with gradients."""
        under_way: list[Call] = []

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not torch.is_grad_enabled() or (self._gated is not None and name not in self._gated):
                return None
            call = Call(name, len(self._calls))
            under_way.append(call)
            self._calls.append(call)
            x = inputs[0]
            if self._measuring and name in self._layers:
                self._see_input(name, x)
            if not x.requires_grad:
                return None
            call.input, passed = Gate(), x.view_as(x)  # a tensor of its own: x may have other users
            call.input.place_on(passed)
            return (passed, *inputs[1:])

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if under_way:
                call = under_way.pop()
                if output.requires_grad:
                    if self._measuring and name in self._layers:
                        call.output.measure = lambda gradient, scale: self._see_output(name, gradient, scale)
                    call.output.place_behind(output)

        return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]

    def _see_input(self, name: str, x: Tensor) -> None:
        self._inputs[name].append(moments_of(x))

    def _see_output(self, name: str, gradient: Tensor, scale: float) -> None:
        self._outputs[name].append((moments_of(gradient), scale))

    def _see_parameter(self, parameter: Tensor, gradient: Tensor, scale: float) -> None:
        name = self._names.get(id(parameter))
        if name is not None:
            self._parameters.setdefault(name, []).append((gradient.detach().abs().amax(), scale))

    def _clear_measurements(self) -> None:
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in self._layers}
        self._outputs: dict[str, list[tuple[Tensor, float]]] = {name: [] for name in self._layers}
        self._parameters: dict[str, list[tuple[Tensor, float]]] = {}

    def _take_measurements(self) -> None:
        """Turn the moments of this step, over all ranks, into ranges; keep the old ones if anything was not finite."""
        table = torch.tensor([self._moments(name) for name in self._layers], dtype=torch.float64)
        largest = torch.tensor([self._largest(name) for name in self._names.values()], dtype=torch.float64)
        self._clear_measurements()
        if self._reduce is not None:
            sums, maxima = table[:, :N_SUMS], table[:, N_SUMS:]
            table = torch.cat([self._reduce(sums.contiguous(), "sum"), self._reduce(maxima.contiguous(), "max")], dim=1)
            largest = self._reduce(largest, "max")
        if not (bool(torch.isfinite(table).all()) and bool(torch.isfinite(largest).all())):
            return
        rows = zip(self._layers.items(), table.tolist(), strict=True)
        ranges = {name: layer_range(layer, Moments(*row)) for (name, layer), row in rows}
        self._settling = 0 if self._settled(ranges) else max(0, self._settling - 1)
        self._ranges, self._backoff = ranges, min(1.0, 2 * self._backoff)
        self._amax = {name: value for name, value in zip(self._names.values(), largest.tolist(), strict=True) if value}

    def _settled(self, ranges: dict[str, LayerRange]) -> bool:
        """Whether no layer wants more than twice as much or half as much as before, where it wants scaling at all."""
        scale = self.get_scale()
        old = [max(each.made.wanted, scale) for each in self._ranges.values()]
        new = [max(each.made.wanted, scale) for each in ranges.values()]
        return len(old) == len(new) and all(0.5 <= a / b <= 2.0 for a, b in zip(old, new, strict=True))

    def _moments(self, name: str) -> Moments:
        """Of this rank, with all scales taken out."""
        inputs = [seen.tolist() for seen in self._inputs[name]]
        outputs = [[value / scale**power for value, power in zip(seen.tolist(), (2, 0, 1), strict=True)]
                   for seen, scale in self._outputs[name]]  # fmt: skip
        return Moments(
            sum(seen[0] for seen in outputs),
            sum(seen[1] for seen in outputs),
            sum(seen[0] for seen in inputs),
            sum(seen[1] for seen in inputs),
            max((seen[2] for seen in outputs), default=0.0),
            max((seen[2] for seen in inputs), default=0.0),
        )

    def _largest(self, name: str) -> float:
        """An upper bound where a parameter collects several gradients in a step."""
        return sum(float(amax) / scale for amax, scale in self._parameters.get(name, []))


def _times(suits: Range, factor: float) -> Range:
    return Range(suits.need * factor, suits.cap * factor)


def _layers(model: nn.Module) -> dict[str, nn.Linear | _ConvNd]:
    """Linear and convolution layers by clean name.

    Raises:
        ConfigError: there is none, or one has fp16 weights, whose gradients could not be unscaled without loss.
    """
    layers = {_clean(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear | _ConvNd)}
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no linear or convolution layer; use torch.amp.GradScaler")
    for name, layer in layers.items():
        if layer.weight.dtype != torch.float32:
            raise ConfigError(
                f"the weight of {name} is {layer.weight.dtype}; expected float32 weights under "
                "torch.autocast(..., dtype=torch.float16), so that gradients can be unscaled in fp32"
            )
    return layers


def _clean(name: str) -> str:
    """Without what DDP and torch.compile put in front."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod").removeprefix("module.")


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")
