"""`thinwire probe` on shaped links: no collective is faster than its link, and a plan follows from it."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.commands import app
from thinwire.lab import lab_available
from thinwire.plan import Probe, fit_link
from thinwire.plan.store import latest

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
BITS_PER_S = 50e6
BURST_S = 8 * 256e3 / BITS_PER_S  # of the lab's shapers


@pytest.mark.timeout(180)
def test_probe_on_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["probe", "--hosts", "2", "--rate", "50mbit", "--largest", "1"])
    assert done.exit_code == 0, done.output
    probe = latest(tmp_path / "thinwire", 2)
    assert isinstance(probe, Probe)
    assert probe.cluster.ranks_per_machine == 2
    assert probe.cluster.cores == os.cpu_count()
    assert probe.facts["link"] == "50mbit"
    assert {"dense", "int4"} <= set(probe.codecs)
    # Bursts may pass a shaper; a megabyte may not.
    assert probe.network.message_s("all_reduce", 1e6) > 0.8 * 8e6 / BITS_PER_S
    assert fit_link(probe.network).bits_per_s < 1.5 * BITS_PER_S
    assert 0.3 * BURST_S < probe.network.burst_s < 1.5 * BURST_S
    assert "lets a burst pass" in done.output
