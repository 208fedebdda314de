"""Cases: the messages of a real step are those that the planner prices: kind, bytes, number and order. Two ranks."""

from __future__ import annotations

import torch.distributed as dist

import thinwire
from gloo.support import Case, Cases, Net, Rank, loss_of, seeded, wrap
from sim.test_predicted_messages import KINDS, STABLE
from thinwire.autopilot.controller import SIGNAL
from thinwire.comm import Pending, Tag, TorchDistTransport
from thinwire.core import Request
from thinwire.fusion import ModelProfile
from thinwire.plan import Cluster, Link, Pricer, measure_codec, network_of_link

CASES = Cases()


class Noting:
    """A transport that keeps what is sent for the channel, as it leaves."""

    def __init__(self, inner: TorchDistTransport) -> None:
        self.inner, self.rank, self.world_size, self.lanes = inner, inner.rank, inner.world_size, inner.lanes
        self.sent: list[tuple[int, int, str, int]] = []

    def start(self, request: Request, tag: Tag) -> Pending:
        if tag.channel:
            self.sent.append((tag.group, tag.round, KINDS[type(request)], request.sent_bytes(self.world_size)))
        return self.inner.start(request, tag)


def _predicted(spec: str, fuse: str) -> Case:
    def run(rank: Rank) -> None:
        for engine in ("plain", "ddp"):
            model = wrap(engine, seeded(Net))
            transport = Noting(TorchDistTransport(dist.new_group()))
            with thinwire.attach(model, compress=spec, fuse=fuse, transport=transport) as wire:
                loss_of(model, rank.index, 0).backward()
                transport.sent.clear()
                loss_of(model, rank.index, 1).backward()
                channel = wire._gradients.channel
            assert channel.scalars == (), f"{SIGNAL} is for the autopilot"
            ready_s = {tensor: 0.001 * (i + 1) for i, tensor in enumerate(list(channel.tensors.values())[::-1])}
            profile = ModelProfile.in_ready_order(ready_s, forward_s=0.01, backward_s=0.02)
            codecs = {one: measure_codec(one, (32, 64), repeats=1) for one in ("dense", spec)}
            cluster = Cluster(world_size=rank.world_size, cores=8)
            pricer = Pricer(profile, network_of_link(Link(1e9, 1e-4), rank.world_size), codecs, cluster)
            predicted = [
                (group, number, str(message.kind), message.sent_bytes)
                for group, work in enumerate(pricer.works(spec, channel.groups))
                for number, messages in enumerate(work.rounds)
                for message in messages
            ]
            # As a wavefront rounds of several groups interleave; within a group, and among first rounds, order is fixed.
            assert sorted(transport.sent, key=lambda one: one[:2]) == predicted, engine
            assert [one[0] for one in transport.sent if one[1] == 0] == [one[0] for one in predicted if one[1] == 0]

    return run


for _spec in STABLE:
    for _fuse in ("auto", "4kB"):
        CASES[f"{_spec}, fuse={_fuse}"] = _predicted(_spec, _fuse)
