"""What a step costs with a given compressor and fusion: bytes, memory, and the simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.comm import fit_lanes
from thinwire.comm.piggyback import Kind, flag_elems
from thinwire.compressors.dense import Dense
from thinwire.core import Compressor, ConfigError, TensorSpec, UnitSpec, Wrapper
from thinwire.fusion import Curve, GroupCosts, ModelProfile, measured_plans, parse_fusion
from thinwire.fusion.groups import (
    Group,
    GroupPlan,
    Groups,
    density_of,
    make_groups,
    names_of,
    plan_groups,
    small_tensors,
    with_small,
)
from thinwire.fusion.prepare import prepare, wire_bytes
from thinwire.plan.cluster import Cluster
from thinwire.plan.codecs import CodecCost
from thinwire.plan.messages import Asked, merged_round
from thinwire.plan.network import Network
from thinwire.plan.step import GroupWork, Message, Simulated, simulate_groups
from thinwire.wrappers.host import OnHost

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
    """A model on a cluster. Everything is a pure function of what it is given.

    Args:
        measured: the profile, on whatever machine; its times are scaled to the cluster's cores.
        codecs: by spec; ``dense`` must be among them.
        host: seconds to select from a tensor of so many elements on the host (``host_curve``); for host offload only.
        scalars: how many numbers of each rank travel with the flags of a step.
    """

    measured: ModelProfile
    network: Network
    codecs: Mapping[str, CodecCost]
    cluster: Cluster
    host: Curve | None = None
    scalars: int = 0

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
        groups = make_groups(self.group_plans(spec, fuse), self._tensors, self._prepared(spec))
        return self._price(spec, fuse, groups, self.works(spec, groups))

    def price_ddp(self, groups: Groups) -> Price:
        """Simulate one step of stock ``DistributedDataParallel`` with these buckets: dense, and no flags at its end."""
        buckets = make_groups([GroupPlan(names_of(group)) for group in groups], self._tensors, self._prepared(DENSE))
        return self._price(DENSE, "ddp", buckets, self.works(DENSE, buckets, flags=False))

    def group_plans(self, spec: str, fuse: str) -> list[GroupPlan]:
        """The groups that a fusion makes of this model with this compressor, for ``make_groups``.

        Raises:
            ConfigError: the compressor was not measured or does not suit the fusion, or there is no curve of the host.
        """
        compressor, planner = self._prepared(spec), parse_fusion(fuse)
        planner.check(compressor)
        if not planner.needs_profile:
            return plan_groups(planner, self.profile.specs, compressor, self.cluster.world_size)
        small = small_tensors(self.profile.specs, compressor)
        fused = self.profile.without(small)
        costs = self._group_costs(spec, compressor, fused)

        def finish_s(plans: list[GroupPlan]) -> float:
            groups = make_groups(with_small(plans, small), self._tensors, compressor)
            return self._simulate(groups, self.works(spec, groups)).finish_s

        # Where ranks have cores to spare, a message takes nothing from backward.
        crowded = self.cluster.busy_slowdown > self.cluster.slowdown
        plans = measured_plans(planner, fused, costs, host=self.host, finish_s=finish_s if crowded else None)
        return with_small(plans, small)

    def _prepared(self, spec: str) -> Compressor:
        if spec not in self.codecs:
            raise ConfigError(f"{spec!r} was not measured; the probe has {', '.join(sorted(self.codecs))}")
        return prepare(spec)

    @cached_property
    def _tensors(self) -> dict[str, TensorSpec]:
        return {tensor.fqn: tensor for tensor in self.profile.specs}

    def _simulate(self, groups: Sequence[Group], works: Sequence[GroupWork]) -> Simulated:
        profile = self.profile
        return simulate_groups(
            works,
            profile.backward_s,
            self.cluster,
            burst_s=self.network.burst_s,
            rested_s=profile.forward_s + profile.optimizer_s,  # from one exchange to the next backward nobody sends
            in_lanes=fit_lanes(
                (unit.compressor.rounds for group in groups for unit in group.units), self.network.lanes
            ),
        )

    def _price(self, spec: str, fuse: str, groups: Sequence[Group], works: Sequence[GroupWork]) -> Price:
        profile, simulated = self.profile, self._simulate(groups, works)
        messages = [message for work in works for one in work.rounds for message in one]
        return Price(
            spec=spec,
            fuse=fuse,
            step_s=profile.forward_s + simulated.finish_s + profile.optimizer_s,
            wire_bytes=_wire_bytes(groups, self.cluster.world_size),
            memory_bytes=memory_bytes(profile.specs, prepare(spec)),
            messages=len(messages),
            startup_s=sum(message.startup_s for message in messages),
            simulated=simulated,
        )

    def _group_costs(self, spec: str, compressor: Compressor, fused: ModelProfile) -> GroupCosts:
        """The step as fusion planners see it: one encode time by elements, one message time by bytes."""
        cost, world_size = self.codecs[spec], self.cluster.world_size
        density = density_of(compressor) or 1.0
        shares = [asked for one in cost.rounds for asked in one]
        return GroupCosts(
            encode=Curve(tuple((n, sum(cost.stage_s(n, world_size))) for n in _SAMPLED_SIZES)),
            message=Curve(
                tuple(
                    (n, sum(self.network.message_s(one.kind, one.share * n) for one in shares)) for n in _SAMPLED_SIZES
                )
            ),
            density=density,
            bytes_per_elem=max(wire_bytes(fused.specs, compressor, world_size) / (max(fused.elems, 1) * density), 1e-3),
        )

    def works(self, spec: str, groups: Sequence[Group], *, flags: bool = True) -> list[GroupWork]:
        """What each group computes and sends.

        Args:
            flags: the last group carries those of the step.
        """
        ready_s = {one.tensor: one.ready_s for one in self.profile.tensors}
        count = flag_elems(len(self.profile.tensors), self.scalars, self.cluster.world_size)
        works: list[GroupWork] = []
        previous_s = 0.0
        for group in groups:
            previous_s = max(
                previous_s, *(ready_s[tensor] for tensor in group.tensors)
            )  # it leaves after those before it
            works.append(self._work(spec, group, previous_s, count if flags and group is groups[-1] else None))
        return works

    def _work(self, spec: str, group: Group, ready_s: float, flags: int | None) -> GroupWork:
        """The units of a group run side by side: their stages add up, their requests of a round are merged.

        Args:
            flags: how many travel with the first round; None: none do.
        """
        world_size = self.cluster.world_size
        costs = [self.codecs[DENSE if isinstance(innermost(u.compressor), Dense) else spec] for u in group.units]
        rounds: list[list[tuple[Asked, int]]] = [[] for _ in range(max(len(cost.rounds) for cost in costs))]
        stages_s, host_s = [0.0] * (len(rounds) + 1), 0.0
        for unit, cost in zip(group.units, costs, strict=True):
            sent_bytes = unit.compressor.wire_bytes(unit.spec, world_size)
            for asked, wanted in zip(rounds, cost.rounds, strict=False):
                asked += [(one, one.nbytes(sent_bytes, world_size)) for one in wanted]
            for stage, seconds in enumerate(cost.stage_s(unit.spec.numel, world_size)):
                if stage == 0 and isinstance(unit.compressor, OnHost) and self.host is not None:
                    host_s += sum(self.host(tensor.numel) for tensor in unit.spec.tensors)
                else:
                    stages_s[stage] += seconds
        stages_s[0] = max(stages_s[0], host_s)  # the host's thread works beside this one
        merged = [merged_round(asked, world_size, None if index else flags) for index, asked in enumerate(rounds)]
        messages = tuple(tuple(self._message(*message) for message in one) for one in merged)
        return GroupWork(ready_s, tuple(stages_s), messages)

    def _message(self, kind: Kind, sent_bytes: float) -> Message:
        network = self.network
        startup_s = network.message_s(kind, 0.0)
        wire_s, cpu_s = network.message_s(kind, sent_bytes), network.cpu_s(kind, sent_bytes)
        return Message(wire_s, cpu_s, sent_bytes, startup_s, kind)


def memory_bytes(tensors: Sequence[TensorSpec], compressor: Compressor) -> int:
    """What the compressor keeps between steps, mostly residuals; fp32."""
    routed = ((compressor.route(tensor), tensor) for tensor in tensors)
    return sum(4 * layout.numel(tensor) for chosen, tensor in routed for layout in chosen.layout().values())


def innermost(compressor: Compressor) -> Compressor:
    """Without its wrappers."""
    return innermost(compressor.inner) if isinstance(compressor, Wrapper) else compressor


def _wire_bytes(groups: Sequence[Group], world_size: int) -> int:
    """What the compressors send of the whole model, however it is cut into groups."""
    tensors: dict[Compressor, list[TensorSpec]] = {}
    for unit in (unit for group in groups for unit in group.units):
        tensors.setdefault(unit.compressor, []).extend(unit.spec.tensors)
    return sum(chosen.wire_bytes(UnitSpec(tuple(members)), world_size) for chosen, members in tensors.items())
