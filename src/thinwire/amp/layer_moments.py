"""How far a layer's gradients must be scaled to survive fp16, from their moments: Zhao et al., IJCAI'20, section 3.

For a layer with weight W and gradient g of its output, the gradient of its input has entries of about

    o = rms(g)·rms(W)·sqrt(F/2),    F = output channels (of a group) times kernel size,

and that of its weight of about rms(x)·rms(g)·sqrt(N), N being the positions summed over. A scale of u_min/(√2·erfinv(T)·o)
leaves a fraction T of normal entries below the smallest fp16 number, u_min. Everything here is about *total* scales, the
global loss scale included, so the layers can be looked at one by one and in any order.
"""

from __future__ import annotations

from math import inf, prod, sqrt
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

SMALLEST_HALF = 2.0**-24
LARGEST_HALF = 65504.0
LOST_FRACTION = 1e-3
# √2·erfinv(T) is the (1 + T)/2 quantile of the normal distribution.
_KEEPS_ALL_BUT_LOST = SMALLEST_HALF / NormalDist().inv_cdf((1 + LOST_FRACTION) / 2)
_MARGIN = 8.0  # between the largest gradient seen in a measured step and those of the steps until the next
_TAIL = 64.0  # the largest entry of a weight gradient, in standard deviations

Layer = nn.Linear | _ConvNd


class Moments(NamedTuple):
    """Of the unscaled gradient g of a layer's output and of its input x, over the calls of a step and over the ranks."""

    g_square_sum: float = 0.0
    g_count: float = 0.0
    x_square_sum: float = 0.0
    x_count: float = 0.0
    g_amax: float = 0.0
    x_amax: float = 0.0


N_SUMS = 4  # the leading fields of Moments that add up; of the others the maximum counts


class Range(NamedTuple):
    """Total scales: below ``need`` entries are lost, above ``cap`` some may overflow."""

    need: float = 0.0
    cap: float = inf

    @property
    def wanted(self) -> float:
        return min(self.need, self.cap)


class LayerRange(NamedTuple):
    """For the gradient that arrives at the layer, and for those that the layer makes of it."""

    arriving: Range = Range()
    made: Range = Range()


def moments_of(x: Tensor) -> Tensor:
    """Sum of squares, count and largest magnitude, fp32, without waiting for a GPU."""
    values = x.detach().float()
    return torch.stack([values.square().sum(), values.new_tensor(values.numel()), values.abs().amax()])


def fan(layer: Layer) -> int:
    """How many products are summed into one entry of the gradient of the layer's input."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels // layer.groups * prod(layer.kernel_size)


def layer_range(layer: Layer, moments: Moments) -> LayerRange:
    """The scales that suit a layer; no need where there was no gradient."""
    if not (moments.g_square_sum > 0 and moments.g_amax > 0):
        return LayerRange()
    weight = layer.weight.detach().float()
    rms_w, amax_w = float(weight.square().mean().sqrt()), float(weight.abs().amax())
    rms_g = sqrt(moments.g_square_sum / moments.g_count)
    rms_x = sqrt(moments.x_square_sum / moments.x_count) if moments.x_count else 0.0
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    input_grad = rms_g * rms_w * sqrt(fan(layer) / 2)
    weight_grad = rms_g * rms_x * sqrt(moments.g_count / channels)
    arriving = Range(_KEEPS_ALL_BUT_LOST / rms_g, LARGEST_HALF / (_MARGIN * moments.g_amax))
    need = max((_KEEPS_ALL_BUT_LOST / size for size in (input_grad, weight_grad) if size > 0), default=0.0)
    worst = max(moments.g_amax * amax_w * fan(layer), _TAIL * weight_grad)
    return LayerRange(arriving, Range(need, min(arriving.cap, LARGEST_HALF / worst if worst else inf)))
