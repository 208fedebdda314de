"""The Triton kernels: interpreted on the CPU, compiled for a GPU that need not be there, chosen for CUDA alone."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from thinwire.kernels import dispatch, reference, triton
from thinwire.kernels.reference_ages import AGES, COLUMNS
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.plans import SHORT_TILE_ELEMS

CASES = Path(__file__).with_name("kernels_triton_cases.py")
AMPERE = GPUTarget("cuda", 80, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def run_cases(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]


@pytest.mark.timeout(300)
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    run_cases({**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    run_cases({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})


class Compiled:
    """Stands in for `launch.run`: compiles what would be launched, once per signature, and launches nothing."""

    def __init__(self) -> None:
        self.ptx: dict[str, str] = {}

    def __call__(self, kernel: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
        options = {"enable_fp_fusion": False, "num_warps": constants.pop("num_warps", 4)}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        signature = {name: self.type_of(value, name in constants) for name, value in values.items()}
        fixed = {name: value for name, value in values.items() if signature[name] == "constexpr"}
        label = f"{kernel.__name__} {signature} {fixed}"
        if label not in self.ptx:
            built = compile(ASTSource(kernel, signature, fixed), target=AMPERE, options=options)
            self.ptx[label] = built.asm["ptx"]

    @staticmethod
    def type_of(value: Any, is_constant: bool) -> str:
        if is_constant or (isinstance(value, int) and value == 1):  # Triton turns an argument of 1 into a constant
            return "constexpr"
        if isinstance(value, Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Operations meet zeros where a GPU would have left results, so that sizes read back from it are sane."""
    compiler = Compiled()
    monkeypatch.setattr(launch, "run", compiler)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return compiler


def call_everything(unit: Tensor) -> None:
    numel = unit.numel()
    offsets, ends = (0, numel), (0, 0, numel)
    residual, out, rank = unit.clone(), unit.clone(), torch.zeros(numel, dtype=torch.int32)
    triton.compensate(unit, residual, 0.9, unit.clone(), 0.5, out)
    triton.ef_topk(unit, residual, offsets, (1,), out)
    triton.ef_threshold_pack(unit, residual, ends, (1.0, 1.0), out)
    triton.row_topk(unit, None, offsets, (48,), (3,), out)
    triton.bank_topk(unit, None, offsets, (48,), 3, out)
    triton.scatter_mean([(unit, rank)], 3, out)
    for encode, decode in ((triton.int8_encode, triton.int8_decode), (triton.int4_encode, triton.int4_decode)):
        coded = encode(unit, residual, 48, out)
        decode(coded.codes, coded.scales, 48, 0.5, out, True)
    for bits in (1, 2):
        coded = triton.coarse_encode(bits, unit, residual, 48, out)
        triton.coarse_decode(bits, coded.codes, coded.scales, 48, 0.5, out, True)
    triton.segment_amax(unit, ends)
    triton.segment_moments(unit, ends)
    triton.all_finite(unit)
    triton.unpack_bits(triton.pack_bits(unit > 0), numel)
    since, ages = torch.zeros(2, numel, dtype=torch.uint8).unbind()
    table = torch.zeros(AGES * COLUMNS)
    triton.count_ages(unit, since, ages, 200)
    triton.aged_adamw(unit, residual, ages, out, unit.clone(), table, 0.9, 0.1, 1.5, 1e-8)


@pytest.mark.timeout(300)
def test_kernels_compile_for_a_gpu_with_every_rounding_kept(compiled: Compiled) -> None:
    call_everything(torch.randn(SHORT_TILE_ELEMS + 1))
    assert {label.split()[0] for label in compiled.ptx} == every_entry_point()
    for label, ptx in compiled.ptx.items():
        for inexact in ("fma.", "div.full", "div.approx", "rcp.approx", ".ftz"):
            assert inexact not in ptx, f"{label}: {inexact} rounds in another way than the reference"


@pytest.mark.timeout(300)
def test_kernels_compile_for_a_unit_of_one_element(compiled: Compiled) -> None:
    call_everything(torch.randn(1))
    assert compiled.ptx


def every_entry_point() -> set[str]:
    """The names of the functions that are launched: those of a module that no other kernel calls."""
    modules = ("ages", "bits", "coarse", "long_topk", "measures", "quantize", "scatter", "select", "short_topk")
    kernels = {
        name: member
        for module in modules
        for name, member in vars(importlib.import_module(f"thinwire.kernels.triton.{module}")).items()
        if hasattr(member, "arg_names")
    }
    called = {name for kernel in kernels.values() for name in kernel.fn.__code__.co_names}
    return set(kernels) - called


def test_dispatch_takes_triton_for_cuda_alone() -> None:
    assert dispatch.kernels_for("cuda") is triton
    assert dispatch.backend("cuda") == "triton"
    assert dispatch.kernels_for("cpu") is not triton
    assert dispatch.kernels_for("meta") is reference


def test_without_triton_cuda_tensors_run_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thinwire.kernels.triton", None)
    assert dispatch.kernels_for.__wrapped__("cuda") is reference


def test_every_operation_of_the_reference_exists() -> None:
    assert set(triton.__all__) == set(reference.__all__)
