"""Probing a transport whose rate is known, and keeping what was measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from thinwire.comm import Pending, Tag, Throttled
from thinwire.comm.transport import Later
from thinwire.core import AllGather, AllReduce, AllToAll, ConfigError, Request
from thinwire.core.schema import from_json, to_json
from thinwire.fusion import Curve
from thinwire.plan import Cluster, CodecCost, Network, Probe, measure_codecs, measure_network
from thinwire.plan.collectives import KINDS
from thinwire.plan.messages import Asked
from thinwire.plan.probe import holds, planned_sizes
from thinwire.plan.roofs import Roofs, measure_roofs
from thinwire.plan.store import keep, latest, probe_path
from thinwire.plan.worker import Settings

BITS_PER_S = 400e6


class _Echo:
    """Three ranks, of which the other two do as this one does."""

    rank, world_size, lanes = 0, 3, 1

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def start(self, request: Request, tag: Tag) -> Pending:
        self.asked.append(request)
        match request:
            case AllReduce():
                return Later(lambda: request.tensor)
            case AllGather():
                return Later(lambda: [request.message] * self.world_size)
            case AllToAll():
                return Later(lambda: request.messages)
            case _:
                return Later(lambda: request.tensor)


class _Shaped(_Echo):
    """A token bucket: after a rest a message gets as far ahead as ``burst_s`` of sending."""

    def __init__(self, bits_per_s: float, burst_s: float) -> None:
        super().__init__()
        self._bits_per_s, self._burst_s, self._paid_s = bits_per_s, burst_s, 0.0

    def start(self, request: Request, tag: Tag) -> Pending:
        pending, sending_s = super().start(request, tag), 8 * request.sent_bytes(self.world_size) / self._bits_per_s
        self._paid_s = max(self._paid_s, time.monotonic() - self._burst_s) + sending_s
        time.sleep(max(0.0, self._paid_s - time.monotonic()))
        return pending


@pytest.fixture(scope="module")
def network() -> Network:
    return measure_network(Throttled(_Echo(), BITS_PER_S), largest_bytes=1 << 20, repeats=3)


def test_every_collective_has_its_curves(network: Network) -> None:
    assert set(network.wire) == set(network.cpu) == set(KINDS)
    assert network.world_size == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_is_faster_than_the_link(network: Network, kind: str) -> None:
    for size, seconds in network.wire[kind].points:  # type: ignore[index]
        assert seconds >= 8 * size / BITS_PER_S * 0.99


def test_sleeping_is_no_processor_time(network: Network) -> None:
    assert network.cpu_s("all_reduce", 1 << 20) < 0.5 * network.message_s("all_reduce", 1 << 20)


def test_larger_sizes_are_left_out_once_a_message_takes_long() -> None:
    echo = _Echo()
    measure_network(Throttled(echo, 10e6), largest_bytes=1 << 30, patience_s=0.02, repeats=3)
    assert max(request.sent_bytes(3) for request in echo.asked) < 1 << 20


@pytest.mark.parametrize(("factor", "expected"), [(1.0, True), (0.5, False), (2.0, False)])
def test_a_network_holds_while_its_rate_does(network: Network, factor: float, expected: bool) -> None:
    assert holds(network, Throttled(_Echo(), factor * BITS_PER_S)) == expected


def test_what_a_shaper_lets_pass_after_a_rest_is_found() -> None:
    """A message of 256 kB takes 0.105 s, 0.045 s after a rest."""
    shaped = _Shaped(20e6, burst_s=0.06)
    network = measure_network(shaped, kinds=["all_reduce"], largest_bytes=1 << 18, repeats=3)
    assert network.burst_s == pytest.approx(0.06, rel=0.3)
    assert from_json(Network, to_json(network), what="network", remedy="") == network


def test_a_link_of_steady_rate_has_no_burst(network: Network) -> None:
    assert network.burst_s == 0.0
    slow = measure_network(Throttled(_Echo(), 20e6), kinds=["all_reduce"], largest_bytes=1 << 18, repeats=3)
    assert slow.burst_s == 0.0


def test_progress_is_told_per_size() -> None:
    told: list[str] = []
    measure_network(_Echo(), largest_bytes=1 << 14, repeats=3, progress=told.append)
    assert len(told) == planned_sizes(1 << 14) == 12


def test_one_rank_has_no_network() -> None:
    alone = _Echo()
    alone.world_size = 1
    with pytest.raises(ConfigError, match="no network to probe"):
        measure_network(alone)


def test_roofs_are_positive() -> None:
    roofs = measure_roofs()
    assert roofs.flops_per_s > 1e6
    assert roofs.memory_bytes_per_s > 1e6


def make_probe(date: str = "2026-01-01T00:00:00+00:00", world_size: int = 4, link: str = "200mbit") -> Probe:
    line = Curve(((1e3, 1e-3), (1e6, 5e-2)))
    cost = CodecCost(((Asked("all_reduce", 1.0),),), {2: (line, line), 8: (line, line)}, 0.0)
    return Probe(
        cluster=Cluster(world_size=world_size, cores=2),
        network=Network(world_size, dict.fromkeys(KINDS, line), dict.fromkeys(KINDS, line), 0.05),
        codecs={"dense": cost},
        roofs=Roofs(1e9, 1e10),
        facts={"link": link},
        date=date,
    )


def test_probes_are_written_and_read(tmp_path: Path) -> None:
    probe = make_probe()
    probe.save(tmp_path / "deep" / "probe.json")
    assert Probe.load(tmp_path / "deep" / "probe.json") == probe


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    for text in ("{}", "not json", '{"version": 99, "codecs": {}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="thinwire probe again"):
            Probe.load(path)


def test_one_file_per_cluster(tmp_path: Path) -> None:
    first = keep(make_probe("2026-01-01T00:00:00+00:00"), tmp_path)
    assert keep(make_probe("2026-01-02T00:00:00+00:00"), tmp_path) == first
    assert keep(make_probe(link="1gbit"), tmp_path) != first
    other = make_probe(world_size=8)
    assert probe_path(tmp_path, other.cluster, other.facts) != first
    assert Probe.load(first).date.startswith("2026-01-02")


def test_the_newest_that_fits_is_taken(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    keep(make_probe("2026-01-03T00:00:00+00:00", world_size=8), tmp_path)
    keep(make_probe("2026-01-02T00:00:00+00:00"), tmp_path)
    (tmp_path / "probe-broken.json").write_text("{")
    assert latest(tmp_path, 4) == make_probe("2026-01-02T00:00:00+00:00")
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.cluster.world_size == 8
    assert latest(tmp_path, 16) is None


def test_settings_of_the_worker(tmp_path: Path) -> None:
    settings = Settings(out="somewhere", specs=["dense"], cores=2, facts={"link": "1gbit"})
    settings.save(tmp_path / "settings.json")
    assert Settings.load(tmp_path / "settings.json") == settings


def test_codecs_are_measured_by_name() -> None:
    told: list[str] = []
    threads = torch.get_num_threads()
    costs = measure_codecs(["dense"], told.append)
    assert list(costs) == told == ["dense"]
    assert torch.get_num_threads() == threads
