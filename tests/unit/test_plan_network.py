"""Networks from links and links from networks; clusters whose ranks share cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import ConfigError
from thinwire.core.schema import from_json, to_json
from thinwire.fusion import Curve
from thinwire.plan import Cluster, Link, Network, collective_s, fit_link, network_at, network_of_link

LINKS = st.builds(Link, st.floats(min_value=1e6, max_value=1e11), st.floats(min_value=0, max_value=0.1))
WORLDS = st.integers(min_value=2, max_value=64)
BYTES = st.floats(min_value=100, max_value=1e9)


@given(LINKS, WORLDS)
def test_a_link_is_found_again_in_its_network(link: Link, world_size: int) -> None:
    found = fit_link(network_of_link(link, world_size))
    assert found.bits_per_s == pytest.approx(link.bits_per_s, rel=1e-3)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-3, abs=1e-9)


@given(LINKS, WORLDS, WORLDS, BYTES)
def test_other_world_sizes_follow_the_closed_forms(link: Link, measured: int, wanted: int, nbytes: float) -> None:
    network = network_at(network_of_link(link, measured), wanted)
    expected_s = collective_s("all_gather", nbytes, wanted, link)
    assert network.message_s("all_gather", nbytes) == pytest.approx(expected_s, rel=1e-3, abs=1e-7)


def test_measured_curves_are_used_where_there_are_any() -> None:
    network = Network(4, {"all_reduce": Curve(((1e3, 0.5), (1e6, 0.7)))}, {})
    assert network_at(network, 4) is network


def test_processor_time_bounds_fast_links() -> None:
    cpu = {"all_reduce": Curve(((1.0, 0.1), (1e9, 10.1)))}
    network = network_of_link(Link(1e12), 4, cpu=cpu)
    assert network.message_s("all_reduce", 1e8) == pytest.approx(cpu["all_reduce"](1e8), rel=0.01)
    assert network.cpu_s("all_reduce", 1e8) == cpu["all_reduce"](1e8)
    assert network.cpu_s("broadcast", 1e8) == 0.0


def test_a_missing_curve_is_a_message() -> None:
    with pytest.raises(ConfigError, match="Run thinwire probe"):
        Network(2, {}, {}).message_s("broadcast", 1.0)


def test_a_flat_curve_has_no_link() -> None:
    with pytest.raises(ConfigError, match="does not rise"):
        fit_link(Network(2, {"all_reduce": Curve(((1e3, 0.5),))}, {}))


@given(LINKS, WORLDS)
def test_json_round_trip(link: Link, world_size: int) -> None:
    network = network_of_link(link, world_size, cpu={"broadcast": Curve(((1.0, 2.0),))})
    assert from_json(Network, to_json(network), what="network", remedy="") == network


def test_four_ranks_on_two_cores_pay_double() -> None:
    shared = Cluster(world_size=4, ranks_per_machine=4, cores=2)
    assert shared.slowdown == 2.0
    assert shared.busy_slowdown - shared.slowdown == 2.0


def test_spare_cores_cost_nothing() -> None:
    alone = Cluster(world_size=4, ranks_per_machine=1, cores=2)
    assert (alone.slowdown, alone.busy_slowdown) == (1.0, 1.0)


@pytest.mark.parametrize(
    "values", [{"world_size": 0}, {"world_size": 2, "cores": 0}, {"world_size": 2, "ranks_per_machine": 3}]
)
def test_impossible_clusters_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Cluster(**values)
