"""The benchmark of the kernels measures what it says, and writes the fields that were agreed on."""

import json

import pytest
import torch
import typer
from benchmarks.kernels.__main__ import bench_kernels_command, run_kernel_bench
from benchmarks.kernels.cases import OPS, make_case
from typer.testing import CliRunner

FIELDS = {"op", "numel", "density", "segments", "threads", "median_s", "spread", "copy_s", "torch_s"}


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench_kernels_command)
    return app


def test_json_has_the_agreed_fields(tmp_path):
    target = tmp_path / "kernels.json"
    arguments = ["--json", str(target), "--size", "4096", "--density", "0.01", "--budget", "0"]
    result = CliRunner().invoke(command(), arguments)
    assert result.exit_code == 0, result.output
    timings = json.loads(target.read_text())
    assert {timing["op"] for timing in timings} == set(OPS)
    for timing in timings:
        assert timing.keys() >= FIELDS
        assert timing["median_s"] > 0
        assert timing["threads"] == 1


def test_an_unknown_op_is_refused_by_name():
    with pytest.raises(ValueError, match="sort_everything"):
        run_kernel_bench(ops=["sort_everything"])
    assert CliRunner().invoke(command(), ["--op", "sort_everything"]).exit_code == 2


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    run_kernel_bench(sizes=[1024], densities=[0.1], ops=["ef_topk"], budget_s=0.0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("op", OPS)
def test_both_contestants_leave_the_same_buffer(op):
    """Whoever is timed against the other must have done the same work."""
    case = make_case(op, 20_000, 1.0 if op.startswith("int") else 0.01, 1)
    case.reset()
    case.kernel()
    by_kernel = case.unit.residual.clone()
    case.reset()
    case.plain_torch()
    assert torch.allclose(by_kernel, case.unit.residual, atol=1e-6)
