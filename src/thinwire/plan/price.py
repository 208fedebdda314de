"""What a step costs with a given compressor and fusion: bytes, memory, and the simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.comm import fit_lanes
from thinwire.comm.piggyback import MOST_COPIED_BYTES, MOST_PIGGYBACKED_BYTES
from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, ConfigError, TensorSpec, UnitSpec, Wrapper
from thinwire.fusion import Curve, Groups, Profile, TensorProfile, parse_fusion
from thinwire.fusion.prepare import prepare, units_of, wire_bytes, wire_share
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost
from thinwire.plan.collectives import Kind
from thinwire.plan.model import ModelProfile
from thinwire.plan.network import Network
from thinwire.plan.step import GroupWork, Message, Simulated, simulate_groups

DENSE = "dense"
_SAMPLED_SIZES = tuple(float(4**exponent) for exponent in range(4, 15))


@dataclass(frozen=True)
class Price:
    """A compressor and a fusion, priced.

    Args:
        step_s: forward, backward with the exchange, optimizer.
        wire_bytes: sent by one rank.
        memory_bytes: of what the compressor keeps between steps.
        messages: collectives of one step.
        startup_s: what these would take one after the other without any bytes.
    """

    spec: str
    fuse: str
    step_s: float
    wire_bytes: int
    memory_bytes: int
    messages: int
    startup_s: float
    simulated: Simulated


@dataclass(frozen=True)
class Pricer:
    """A model on a cluster. Everything is a pure function of these four.

    Args:
        measured: the profile, on whatever machine; its times are scaled to the cluster's cores.
        codecs: by spec; ``dense`` must be among them.
    """

    measured: ModelProfile
    network: Network
    codecs: Mapping[str, CodecCost]
    cluster: Cluster

    def __post_init__(self) -> None:
        if DENSE not in self.codecs:
            raise ConfigError("the probe has no 'dense' among its compressors; it is what all others are compared with")
        if self.network.world_size != self.cluster.world_size:
            raise ConfigError(
                f"the network is for {self.network.world_size} ranks and the cluster has {self.cluster.world_size}; "
                "use network_at(network, world_size)"
            )

    @cached_property
    def profile(self) -> ModelProfile:
        """As it would be measured on this cluster's cores."""
        return self.measured.scaled(self.cluster.slowdown / self.measured.slowdown)

    @property
    def floor_s(self) -> float:
        """The step without any communication."""
        return self.profile.compute_s

    def price(self, spec: str, fuse: str) -> Price:
        """Simulate one step."""
        if spec not in self.codecs:
            raise ConfigError(f"{spec!r} was not measured; the probe has {', '.join(sorted(self.codecs))}")
        compressor = prepare(spec)
        groups = self._groups(spec, compressor, fuse)
        return self._price(spec, fuse, compressor, self._works(spec, compressor, groups, self._agreement_bytes))

    def price_ddp(self, groups: Groups) -> Price:
        """Simulate one step of stock ``DistributedDataParallel`` with these buckets: dense, and no agreement at its end."""
        compressor = prepare(DENSE)
        return self._price(DENSE, "ddp", compressor, self._works(DENSE, compressor, groups))

    def _price(self, spec: str, fuse: str, compressor: Compressor, works: Sequence[GroupWork]) -> Price:
        profile = self.profile
        # From the end of one exchange to the next backward nobody sends.
        rested_s = profile.forward_s + profile.optimizer_s
        rounds = (compressor.route(tensor).rounds for tensor in profile.specs)
        simulated = simulate_groups(
            works,
            profile.backward_s,
            self.cluster,
            burst_s=self.network.burst_s,
            rested_s=rested_s,
            in_lanes=fit_lanes(rounds, self.network.lanes),
        )
        messages = [message for work in works for one in work.rounds for message in one]
        return Price(
            spec=spec,
            fuse=fuse,
            step_s=profile.forward_s + simulated.finish_s + profile.optimizer_s,
            wire_bytes=wire_bytes(profile.specs, compressor, self.cluster.world_size),
            memory_bytes=memory_bytes(profile.specs, compressor),
            messages=len(messages),
            startup_s=sum(message.startup_s for message in messages),
            simulated=simulated,
        )

    def _groups(self, spec: str, compressor: Compressor, fuse: str) -> Groups:
        """The planner's groups; what stays dense because it is small travels with the last one, as in training."""
        specs = self.profile.specs
        small = [tensor for tensor in specs if isinstance(compressor.route(tensor), Dense)]
        if len(small) == len(specs):
            small = []
        fused = [one for one in self.profile.tensors if one.tensor not in small]
        planner = parse_fusion(fuse)
        if planner.needs_profile:
            groups = planner.plan(self._fusion_profile(spec, compressor, fused))
        else:
            tensors = [one.tensor for one in fused]
            groups = planner(tensors, wire_share(tensors, compressor, self.cluster.world_size))
        return [*groups[:-1], (*groups[-1], *small)]

    def _fusion_profile(self, spec: str, compressor: Compressor, fused: Sequence[TensorProfile]) -> Profile:
        """The step in the words of the fusion planners: one encode time by elements, one message time by bytes."""
        cost, world_size = self.codecs[spec], self.cluster.world_size
        tensors = tuple(one.tensor for one in fused)
        density, elems = density_of(compressor), sum(tensor.numel for tensor in tensors)
        shares = [entry for one in cost.rounds for entry in one]
        return Profile(
            tensors=tuple(fused),
            encode=Curve(tuple((n, sum(cost.stage_s(n, world_size))) for n in _SAMPLED_SIZES)),
            message=Curve(tuple((n, sum(self._message(k, s * n).wire_s for k, s in shares)) for n in _SAMPLED_SIZES)),
            density=density,
            bytes_per_elem=max(wire_bytes(tensors, compressor, world_size) / (elems * density), 1e-3),
            message_cost_s=self._stolen_s(shares),
        )

    def _stolen_s(self, shares: Sequence[tuple[Kind, float]]) -> float:
        """By how much the messages of one more group delay backward, whatever their size."""
        stolen = self.cluster.busy_slowdown - self.cluster.slowdown
        return stolen * sum(self.network.cpu_s(kind, 0.0) for kind, _ in shares)

    def _works(
        self, spec: str, compressor: Compressor, groups: Groups, agreement_bytes: int | None = None
    ) -> list[GroupWork]:
        ready_s = {one.tensor: one.ready_s for one in self.profile.tensors}
        works: list[GroupWork] = []
        previous_s = 0.0
        for group in groups:
            previous_s = max(previous_s, *(ready_s[tensor] for tensor in group))  # submitted after those before it
            gathered_bytes = agreement_bytes if group is groups[-1] else None
            works.append(self._work(spec, compressor, group, previous_s, gathered_bytes))
        return works

    def _work(
        self,
        spec: str,
        compressor: Compressor,
        group: Sequence[TensorSpec],
        ready_s: float,
        gathered_bytes: int | None,
    ) -> GroupWork:
        """The units of a group run side by side: their stages add up, their messages of a round are merged by kind.

        Args:
            gathered_bytes: what else is gathered in the first round; None: nothing.
        """
        world_size = self.cluster.world_size
        stages_s: list[float] = []
        rounds: list[dict[Kind, float]] = []
        for chosen, tensors in units_of(group, compressor).items():
            unit, cost = UnitSpec(tensors), self.codecs[DENSE if isinstance(chosen, Dense) else spec]
            sent_bytes = chosen.wire_bytes(unit, world_size)
            rounds += [{} for _ in range(len(cost.rounds) - len(rounds))]
            stages_s += [0.0] * (len(cost.rounds) + 1 - len(stages_s))
            for stage, seconds in enumerate(cost.stage_s(unit.numel, world_size)):
                stages_s[stage] += seconds
            for merged, entries in zip(rounds, cost.rounds, strict=False):
                for kind, share in entries:
                    merged[kind] = merged.get(kind, 0.0) + share * sent_bytes
        rounds = [_with_riders(merged, world_size) for merged in rounds]
        if gathered_bytes is not None:
            kind = _carrier(rounds[0], world_size)
            rounds[0][kind] = rounds[0].get(kind, 0.0) + gathered_bytes
        messages = tuple(tuple(self._message(kind, n) for kind, n in merged.items()) for merged in rounds)
        return GroupWork(ready_s, tuple(stages_s), messages)

    @property
    def _agreement_bytes(self) -> int:
        """What travels with the last group of a step: one byte per tensor, and two more, are gathered."""
        return (self.cluster.world_size - 1) * (2 + len(self.measured.tensors))

    def _message(self, kind: Kind, sent_bytes: float) -> Message:
        network = self.network
        startup_s = network.message_s(kind, 0.0)
        return Message(network.message_s(kind, sent_bytes), network.cpu_s(kind, sent_bytes), sent_bytes, startup_s)


def _carrier(messages: Mapping[Kind, float], world_size: int) -> Kind:
    """What the agreement of the ranks travels with, as in ``comm.merge``.

    Args:
        messages: sent bytes by kind.
    """
    if messages.get("all_to_all") and not messages.get("all_gather"):
        return "all_to_all"
    return "all_reduce" if 0 < _reduced_bytes(messages, world_size) <= MOST_COPIED_BYTES else "all_gather"


def _with_riders(messages: Mapping[Kind, float], world_size: int) -> dict[Kind, float]:
    """Short sums as part of an all-to-all, as in ``comm.piggyback``."""
    reduced_bytes = _reduced_bytes(messages, world_size)
    if not messages.get("all_to_all") or not 0 < world_size * reduced_bytes <= MOST_PIGGYBACKED_BYTES:
        return dict(messages)
    merged = dict(messages)
    del merged["all_reduce"]
    merged["all_to_all"] += (world_size - 1) * reduced_bytes
    return merged


def _reduced_bytes(messages: Mapping[Kind, float], world_size: int) -> float:
    """Of what a ring sends nearly twice."""
    return messages.get("all_reduce", 0.0) * world_size / max(2 * (world_size - 1), 1)


def memory_bytes(tensors: Sequence[TensorSpec], compressor: Compressor) -> int:
    """What the compressor keeps between steps, mostly residuals; fp32."""
    routed = ((compressor.route(tensor), tensor) for tensor in tensors)
    return sum(4 * layout.numel(tensor) for chosen, tensor in routed for layout in chosen.layout().values())


def density_of(compressor: Compressor) -> float:
    """The density of a sparsifier, also inside wrappers; 1 for everything else."""
    if isinstance(compressor, Wrapper):
        return density_of(compressor.inner)
    return float(getattr(compressor, "density", 1.0))
