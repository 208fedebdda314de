"""Tensor lists of published architectures, the timings that SAFusion's authors published for one cluster, and a step of them.

Ready times are proportional to tensor sizes, in reverse order of registration: the authors give backward times per model
only and divide them in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from thinwire.core import TensorSpec
from thinwire.fusion import Curve, GroupCosts, GroupPlan, Groups, ModelProfile, TensorProfile
from thinwire.plan import Cluster, GroupWork, Message, Simulated, simulate_groups

Shapes = list[tuple[int, ...]]

_KB = 1000
# T_cm by payload, T_cp by the fp32 bytes of the tensors.
MESSAGE = Curve(
    tuple(
        (size_kb * _KB, seconds)
        for size_kb, seconds in [
            (0.1, 0.0051),
            (1, 0.0055),
            (10, 0.0056),
            (100, 0.0060),
            (1e3, 0.0197),
            (1e4, 0.112),
            (1e5, 1.006),
            (1.5e5, 1.516),
        ]
    )
)
ENCODE = Curve(
    tuple(
        (size_kb * _KB / 4, seconds)
        for size_kb, seconds in [
            (10, 7.7e-5),
            (100, 1.8e-4),
            (1e3, 3.2e-4),
            (1e4, 2.4e-4),
            (1e5, 3.5e-4),
            (1e6, 1.6e-3),
        ]
    )
)
BACKWARD_S = {"resnet152": 0.0570, "vgg19": 0.0176, "bert_base": 0.0464}
PUBLISHED_PARAMETERS = {"resnet152": 60_192_808, "vgg19": 143_667_240, "bert_base": 109_482_240}


def resnet152() -> Shapes:
    """Stem, 3 + 8 + 36 + 3 bottleneck blocks, classifier; each convolution with its batch norm's weight and bias."""
    shapes: Shapes = _convolution(64, 3, 7)
    channels = 64
    for blocks, width in ((3, 64), (8, 128), (36, 256), (3, 512)):
        for block in range(blocks):
            shapes += _convolution(width, channels, 1) + _convolution(width, width, 3)
            shapes += _convolution(4 * width, width, 1)
            if block == 0:
                shapes += _convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def _convolution(outputs: int, inputs: int, kernel: int) -> Shapes:
    return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]


def vgg19() -> Shapes:
    """16 convolutions and 3 linear layers, with biases."""
    shapes: Shapes = []
    channels = 3
    for layers, width in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(layers):
            shapes += [(width, channels, 3, 3), (width,)]
            channels = width
    for outputs, inputs in ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def bert_base() -> Shapes:
    """Embeddings, 12 layers of attention and feed-forward, pooler."""
    hidden, inner = 768, 3072
    norm: Shapes = [(hidden,), (hidden,)]
    square: Shapes = [(hidden, hidden), (hidden,)]
    layer = 4 * square + norm + [(inner, hidden), (inner,), (hidden, inner), (hidden,)] + norm
    return [(30522, hidden), (512, hidden), (2, hidden), *norm, *(12 * layer), *square]


MODELS = {"resnet152": resnet152, "vgg19": vgg19, "bert_base": bert_base}


@dataclass(frozen=True)
class Case:
    """What a fusion planner is given."""

    profile: ModelProfile
    costs: GroupCosts

    def simulated(self, groups: Groups) -> Simulated:
        """The step with one message per group."""
        works = [self._work(group, self.costs.encode_s(group), self.costs.message_s(group)) for group in groups]
        return simulate_groups(works, self.profile.backward_s, Cluster(world_size=2, cores=8))

    def simulated_parts(self, plans: Sequence[GroupPlan]) -> Simulated:
        """The step with two messages per group where part of it stays dense."""
        known, works = {tensor.fqn: tensor for tensor in self.profile.specs}, []
        for plan in plans:
            dense = tuple(known[name] for name in plan.names if name in plan.dense)
            sparse = tuple(known[name] for name in plan.names if name not in plan.dense)
            if dense:
                works.append(self._work(dense, 0.0, self.costs.message(4 * sum(tensor.numel for tensor in dense))))
            if sparse:
                payload = (plan.density or 1.0) * sum(tensor.numel for tensor in sparse) * self.costs.bytes_per_elem
                works.append(self._work(sparse, self.costs.encode_s(sparse), self.costs.message(payload)))
        return simulate_groups(works, self.profile.backward_s, Cluster(world_size=2, cores=8))

    def finish_s(self, groups: Groups) -> float:
        return self.simulated(groups).finish_s

    def _work(self, group: Sequence[TensorSpec], encode_s: float, message_s: float) -> GroupWork:
        ready_s = {one.tensor.fqn: one.ready_s for one in self.profile.tensors}
        return GroupWork(max(ready_s[tensor.fqn] for tensor in group), (encode_s, 0.0), ((Message(message_s),),))


def case(
    sizes: Sequence[int],
    ready_s: Sequence[float],
    encode: Curve,
    message: Curve,
    density: float = 1.0,
    bytes_per_elem: float = 4.0,
) -> Case:
    """Tensors t0, t1, ... whose last gradient ends backward."""
    pairs = enumerate(zip(sizes, ready_s, strict=True))
    tensors = tuple(TensorProfile(TensorSpec(f"t{i}", (size,)), at_s) for i, (size, at_s) in pairs)
    profile = ModelProfile(tensors=tensors, backward_s=max(ready_s, default=0.0))
    return Case(profile, GroupCosts(encode, message, density, bytes_per_elem))


def published(model: str, density: float) -> Case:
    """The model with its published backward time and the published curves; top-k with 4-byte values and indices."""
    tensors = [TensorSpec(f"t{index}", shape) for index, shape in enumerate(MODELS[model]())][::-1]
    done = list(accumulate(tensor.numel for tensor in tensors))
    ready_s = [BACKWARD_S[model] * elems / done[-1] for elems in done]
    members = tuple(TensorProfile(tensor, at) for tensor, at in zip(tensors, ready_s, strict=True))
    profile = ModelProfile(tensors=members, backward_s=members[-1].ready_s)
    return Case(profile, GroupCosts(ENCODE, MESSAGE, density=density, bytes_per_elem=8.0))
