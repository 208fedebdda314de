"""The sparsifier benchmarks measure what they say, on inputs whose answer is known."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.convergence.results import Results
from benchmarks.convergence.tasks import TASKS, WORKERS, Batch, Task
from benchmarks.convergence.train import OURS, STOCK
from benchmarks.convergence.wire import SimulatedWire
from benchmarks.sparsifiers import bars, budget, loss_tables, report, suite
from benchmarks.sparsifiers.budget import Family, Fitted, calibrate, families, solve, wire_bytes
from benchmarks.sparsifiers.gradients import measure
from benchmarks.sparsifiers.lanes import Method, fused, routed
from benchmarks.sparsifiers.stream import Sample, samples
from benchmarks.sparsifiers.studies import EnergyStudy, RowStudy, TensorStudy, longest_run
from torch import Tensor, nn

from thinwire.core import TensorSpec

TENSORS = [TensorSpec("a", (256, 128)), TensorSpec("b", (128, 320)), TensorSpec("bias", (64,))]
BUDGET = wire_bytes("topk(density=0.05)", TENSORS, 4)
COARSE = ("adtopk", "adtopk, rows only", "acp", "powersgd", "bank", "bank, shared", "dct")  # whole entries or ranks
TOPK = next(family for family in families() if family.label == "topk")


def sample(step: int, gradient: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> Sample:
    """All workers have found the same."""
    return Sample(step, [gradient] * WORKERS, weights or {name: torch.ones_like(g) for name, g in gradient.items()})


@pytest.mark.parametrize("family", families(), ids=lambda family: family.label)
def test_settings_meet_the_budget(family: Family) -> None:
    fitted = solve(family, TENSORS, BUDGET, 4)
    assert fitted.wire_bytes == wire_bytes(fitted.spec, TENSORS, 4)
    assert fitted.wire_bytes == pytest.approx(BUDGET, rel=0.25 if family.label in COARSE else 0.03)


def test_of_whole_ranks_the_nearest_is_taken() -> None:
    acp = next(family for family in families() if family.label == "acp")
    fitted = solve(acp, TENSORS, BUDGET, 4)
    prices = {rank: wire_bytes(f"acp(rank={rank})", TENSORS, 4) for rank in range(1, 100)}
    assert fitted.spec == f"acp(rank={min(prices, key=lambda rank: abs(prices[rank] / BUDGET - 1))})"


def test_a_budget_out_of_reach_gets_the_nearest_setting() -> None:
    assert solve(TOPK, TENSORS, 1, 4).spec == TOPK.spec(TOPK.low)
    assert solve(TOPK, TENSORS, 1e12, 4).spec == TOPK.spec(TOPK.high)


@pytest.mark.parametrize("really", [lambda nbytes: 1.7 * nbytes, lambda nbytes: 300 * nbytes**0.5])
def test_what_depends_on_data_is_set_by_what_was_sent(really: Callable[[float], float]) -> None:
    def sent_bytes(spec: str) -> float:
        return really(wire_bytes(spec, TENSORS, 4))

    fitted = calibrate(TOPK, TENSORS, BUDGET, 4, sent_bytes)
    assert sent_bytes(fitted.spec) == pytest.approx(BUDGET, rel=0.02)
    assert fitted.wire_bytes == round(sent_bytes(fitted.spec))


def test_layer_selections_that_are_not_registered_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available", list)
    assert [name for name in suite.names() if ", topk" in name] == []
    assert "topk" in suite.names()


def test_energy_kept_and_lag_of_a_known_gradient() -> None:
    tensor = TensorSpec("w", (32, 64))
    gradient = torch.zeros(tensor.numel)
    gradient[0], gradient[1] = 3.0, 4.0
    one_entry = 1.5 / tensor.numel
    study = EnergyStudy([tensor], [Fitted("topk", f"topk(density={one_entry})", 0)], ignored_steps=1)
    for step in range(2):
        study.add(sample(step, {"w": gradient}))
    (row,) = study.result()
    assert row.kept_first == pytest.approx(16 / 25)  # 4 is sent, 3 waits
    assert row.kept == pytest.approx(36 / 52)  # 3 + 3 is sent, 4 waits
    assert row.lag == pytest.approx(4 / 10)  # 6 and 4 arrived of 6 and 8
    assert not row.varies


def test_all_that_is_sent_has_no_lag_and_all_energy() -> None:
    tensor = TensorSpec("w", (32, 64))
    study = EnergyStudy([tensor], [Fitted(s, f"{s}(density=1.0)", 0) for s in ("topk", "dgc")], ignored_steps=1)
    for step in range(3):
        study.add(sample(step, {"w": torch.randn(tensor.numel, generator=torch.Generator().manual_seed(step))}))
    topk, dgc = study.result()
    assert (topk.kept, dgc.kept) == (1.0, 1.0)
    assert topk.lag == pytest.approx(0.0, abs=1e-6)
    assert dgc.lag is None


def test_dgc_is_offered_its_velocity() -> None:
    tensor = TensorSpec("w", (32, 64))
    gradient = torch.zeros(tensor.numel)
    gradient[0], gradient[1] = 3.0, 4.0
    method = Method(routed([tensor], f"dgc(density={1.5 / tensor.numel}, momentum=0.5)"))
    method.exchange(sample(0, {"w": gradient}))
    second = method.exchange(sample(1, {"w": gradient}))
    # Entry 0 has waited: v = 3, u = 0.5 * 3 + 3. Entry 1 was sent, so its u and v began anew.
    assert second.offered_energy == pytest.approx(WORKERS * (7.5**2 + 4**2))
    assert second.left_energy == pytest.approx(WORKERS * 4**2)


def test_rows_missing_counts_rows_with_something_to_send() -> None:
    tensor = TensorSpec("w", (32, 64))
    gradient = torch.full((32, 64), 1e-3)
    gradient[3], gradient[7] = 1.0, 0.0  # row 3 takes all of the top-k, row 7 has nothing to send
    specs = ["topk(density=0.015625)", "adtopk(density=0.015625, interleave=False)"]
    study = RowStudy([tensor, TensorSpec("bias", (32,))], specs, ignored_steps=0)
    study.add(sample(0, {"w": gradient.flatten(), "bias": torch.ones(32)}))
    (row,) = study.result()
    assert (row.tensor, row.rows, row.row_elems) == ("w", 32, 64)
    assert row.missing[specs[0]] == pytest.approx(30 / 31)
    assert row.missing[specs[1]] == 0.0


def test_a_fused_topk_misses_the_quiet_tensor() -> None:
    tensors = [TensorSpec("loud", (40, 10)), TensorSpec("quiet", (10,)), TensorSpec("also loud", (10, 10))]
    gradient = {"loud": torch.ones(400), "quiet": torch.full((10,), 1e-6), "also loud": torch.ones(100)}
    study = TensorStudy(tensors, (1, 2, 1000), "topk(density=0.1)", ignored_steps=1)
    for step in range(5):
        study.add(sample(step, gradient))
    segmented, pairs, all_at_once = study.result()
    assert (segmented.degree, segmented.missing, segmented.longest_wait) == (1, 0.0, 0)
    assert (pairs.degree, pairs.groups) == (2, 2)
    assert pairs.missing == pytest.approx(1 / 3)
    assert (all_at_once.degree, all_at_once.groups, all_at_once.longest_wait) == (3, 1, 4)


def test_longest_run() -> None:
    assert [longest_run(flags) for flags in ([], [True], [True, False, True, True], [False])] == [0, 1, 2, 0]


def test_fused_lanes_hold_every_tensor_once() -> None:
    lanes = fused(TENSORS, "topk(density=0.1)", 2)
    assert [[tensor.fqn for tensor in lane.members] for lane in lanes] == [["a", "b"], ["bias"]]
    assert [lane.unit.numel for lane in lanes] == [256 * 128 + 128 * 320, 64]


class Points:
    """Something to learn: which half of the inputs is larger."""

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + rank))
        return x, (x[:, :32].sum(dim=1) > x[:, 32:].sum(dim=1)).long()

    def evaluation(self) -> list[Batch]:
        return [self.batch(10**6, 0, 0)]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.hidden(x).relu()), labels)


@pytest.fixture
def tiny() -> Task:
    return Task(name="tiny", label="tiny", source=Points(), model=Classifier, learning_rate=1e-2)


def test_samples_repeat_and_are_not_overwritten_by_training(tiny: Task) -> None:
    first, second = (list(samples(tiny, 3, before=2)) for _ in range(2))
    assert [one.step for one in first] == [0, 1, 2]
    assert torch.equal(first[2].gradients[1]["hidden.weight"], second[2].gradients[1]["hidden.weight"])
    assert not torch.equal(first[0].weights["hidden.weight"], first[1].weights["hidden.weight"])
    assert not torch.equal(first[0].gradients[0]["hidden.weight"], first[0].gradients[1]["hidden.weight"])


def test_measure_and_report(tiny: Task, tmp_path: Path) -> None:
    chosen = [family for family in families() if family.label in ("topk", "redsync", "roundrobin, topk")]
    measured = measure(tiny, 4, 1, chosen)
    text = report.write([measured], tmp_path)
    kept = {row.label: row.kept for row in measured.energy}
    assert 0 < kept["topk"] < kept["int4 (more bytes)"] < 1
    assert {row.label: row.varies for row in measured.energy}["redsync"]
    assert measured.budget_bytes == pytest.approx(measured.energy[0].sent_bytes)
    # A bar inside a table would end the cell.
    assert "\\| topk(" in text or "roundrobin, topk" not in kept
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "results.json").exists()
    ET.fromstring((tmp_path / "energy.svg").read_text(encoding="utf-8"))


def test_bars_are_as_long_as_their_values_and_escape_labels() -> None:
    root = ET.fromstring(bars.picture("<t>", {"one": {"a & b": 1.0, "c": 0.25, "d": -1.0}}))
    widths = [float(rect.attrib["width"]) for rect in root.iter("{http://www.w3.org/2000/svg}rect")][2:]
    assert widths[1] == pytest.approx(widths[0] / 4, abs=0.1)
    assert widths[2] == 0.0
    assert "a & b" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_only_sparse_wires_get_our_optimizer() -> None:
    methods = [Fitted(spec, spec, 0) for spec in ("dense", "int4", "topk(density=0.02)", "dct", "powersgd", "mipd")]
    runs = suite.grid({"cnn": methods}, steps=7)
    assert {(run.task, run.steps) for run in runs} == {("cnn", 7)}
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6 + [2] * 6
    assert {run.compress: run.optimizer for run in runs} == {
        **dict.fromkeys(("dense", "int4", "dct", "powersgd"), STOCK),
        **dict.fromkeys(("topk(density=0.02)", "mipd"), OURS),
    }


def test_suite_settings_are_at_the_budget_of_the_task() -> None:
    found = suite.settings(TASKS["cnn"], ["dense", "bank", "oktopk"])
    assert [one.label for one in found] == ["dense", "bank", "oktopk"]
    for one in found[1:]:
        assert one.wire_bytes == pytest.approx(suite.budget_of(TASKS["cnn"]), rel=0.02)


def test_the_simulated_wire_shows_the_weights_to_who_needs_them() -> None:
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.zero_()[-4:] = 1.0  # the last block of 256; without weights, of equal blocks the first would go
    wire = SimulatedWire(model, "mipd(density=0.0625, score='product')", 2, 0)
    means = wire.exchange([{"weight": torch.ones(64, 64)}] * 2)
    assert means["weight"].nonzero()[:, 0].unique().tolist() == [60, 61, 62, 63]


def result(compress: str, loss: float, seed: int, **more: Any) -> dict[str, Any]:
    settings = {"task": "cnn", "compress": compress, "optimizer": STOCK, "steps": 300, "seed": seed}
    defaults = {"lr_factor": 1.0, "beta2": 0.999, "clip": None, "seconds": 60.0, "sent_bytes_per_step": 1000.0}
    return {**settings, **defaults, "loss": loss, **more}


def test_losses_are_compared_with_dense_of_the_same_seed() -> None:
    spec = "roundrobin(budget=0.3) | topk(density=0.02)"
    results = Results([
        result("dense", 1.0, 0), result("dense", 2.0, 1), result(spec, 1.1, 0), result(spec, 2.4, 1),
        result("dct(density=0.1, block=64)", 0.9, 0), result("acp(rank=3)", 1.0, 2),
    ])  # fmt: skip
    rows = [line.split(" | ") for line in loss_tables.report(results).splitlines() if line.startswith("| `")]
    assert [row[-1].removesuffix(" |") for row in rows] == ["-10.0 %", "+0.0 %", "+15.0 %", ""]
    assert rows[2][0] == "| `roundrobin(budget=0.3) \\| topk(density=0.02)`"
    assert rows[2][-2] == "1.100, 2.400"
    picture = loss_tables.picture(results)
    assert "roundrobin(budget=0.3) | topk<" in picture
    assert "dct<" in picture
    assert "acp" not in picture


def test_methods_are_named_without_what_was_fitted() -> None:
    specs = ["topk(density=0.02)", "adtopk(density=0.02, interleave=False)", "dct(density=0.1, block=9)", "int4"]
    assert [loss_tables.method_of(spec) for spec in specs] == ["topk", "adtopk(interleave=False)", "dct", "int4"]


def test_a_method_sends_what_it_declares() -> None:
    method = Method(routed(TENSORS, "topk(density=0.05)"))
    generator = torch.Generator().manual_seed(0)
    outcome = method.exchange(sample(0, {t.fqn: torch.randn(t.numel, generator=generator) for t in TENSORS}))
    assert outcome.sent_bytes == BUDGET
    assert set(outcome.offered) == {"a", "b"}
    assert set(outcome.means) == {"a", "b", "bias"}
