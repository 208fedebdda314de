"""What few-bit exchanges really put on the links, by interface counters, against a ring all-reduce of bf16 values."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from thinwire.lab import lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "precision" / "exchange_bytes.py"


@pytest.mark.timeout(180)
def test_eight_bits_move_about_half_and_four_bits_about_a_quarter() -> None:
    spec = importlib.util.spec_from_file_location("exchange_bytes", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    counted = benchmark.measure(steps=2)
    ring = counted[benchmark.RING]
    assert ring >= 2 * 3 / 4 * 2 * benchmark.SIDE**2, "the yardstick itself did not go over the links"
    for wire in ("fp8", "int8"):
        assert 0.45 * ring <= counted[wire] <= 0.55 * ring, wire
    for wire in ("int4", "float4", "best4"):
        assert 0.24 * ring <= counted[wire] <= 0.30 * ring, wire
