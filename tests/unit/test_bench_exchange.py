"""The exchange benchmark: who takes part, and what its table says."""

import pytest
from benchmarks.step.exchange import Turn, contestant, row


@pytest.mark.parametrize(
    ("name", "mode", "compress", "fuse"),
    [
        ("floor", "floor", "auto", "auto"),
        ("int4", "thinwire", "int4", "auto"),
        ("int4/4MiB", "thinwire", "int4", "4MiB"),
    ],
)
def test_names(name: str, mode: str, compress: str, fuse: str) -> None:
    made = contestant(name, "small")
    assert (made.name, made.mode, made.compress, made.fuse) == (name, mode, compress, fuse)


def test_the_floor_is_subtracted_round_by_round() -> None:
    floor = [Turn(0.010, 0.040), Turn(0.030, 0.120), Turn(0.020, 0.080)]
    turns = [Turn(one.wall_s + 0.1, one.cpu_s + extra_s) for one, extra_s in zip(floor, (0.3, 0.2, 0.1), strict=True)]
    assert row("200mbit", "int4", turns, floor) == "| 200mbit | `int4` | 100.0 ± 0.0 ms | 200.0 ± 57.7 ms |"
