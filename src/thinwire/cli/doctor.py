"""``thinwire doctor``: what was found on this machine, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warn", "missing"]  # "missing" is only for what thinwire cannot do without
STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "missing": "bold red"}
MIN_TORCH = (2, 6)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """Say what was found here (torch, backends, kernels, namespaces, cores) and what to do about what is missing."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    raise typer.Exit(int(any(finding.status == "missing" for finding in findings)))


def examine() -> list[Finding]:
    """Look at everything; a look that itself fails becomes a warning, so that the rest is still seen."""
    torch_found = look_at_torch()
    looks: list[Callable[[], Finding | Iterator[Finding]]] = [look_at_cores, look_at_compiler, look_at_lab]
    if torch_found.status == "ok":
        looks = [look_at_backends, look_at_threads, look_at_kernels, look_at_triton, *looks]
    findings = [torch_found]
    for look in looks:
        findings += _guarded(look)
    return findings


def _guarded(look: Callable[[], Finding | Iterator[Finding]]) -> list[Finding]:
    try:
        found = look()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # whatever is broken on the machine: the other findings must still be shown
        name = look.__name__.removeprefix("look_at_")
        return [Finding(name, "warn", f"{type(error).__name__}: {error}", "this check itself failed; please report it")]


def look_at_torch() -> Finding:
    """PyTorch: there, new enough, and how it was built."""
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "missing", f"not importable ({error})", "install it: pip install torch")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}"
    if version < MIN_TORCH:
        return Finding("torch", "missing", found, "thinwire needs torch 2.6 or newer: pip install --upgrade torch")
    return Finding("torch", "ok", found)


def look_at_backends() -> Iterator[Finding]:
    """The backends of torch.distributed: one is needed, gloo is the one for CPUs."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("distributed", "missing", "torch was built without it", "install a standard build of torch")
        return
    gloo, nccl, mpi = dist.is_gloo_available(), dist.is_nccl_available(), dist.is_mpi_available()
    yield Finding(
        "gloo", *(("ok", "available") if gloo else ("warn", "absent", "needed to train on CPUs and for the demo"))
    )
    if torch.cuda.is_available() and not nccl:
        yield Finding("nccl", "warn", "absent, though there is a GPU", "install a CUDA build of torch")
    else:
        yield Finding("nccl", "ok", "available" if nccl else "absent (not needed: no GPU)")
    yield Finding("mpi", "ok", "available" if mpi else "absent (optional: needs a torch built with MPI)")
    if not (gloo or nccl or mpi):
        yield Finding("distributed", "missing", "no backend at all", "install a standard build of torch")


def look_at_threads() -> Finding:
    """How many threads torch would use."""
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    if threads > cores:
        return Finding("threads", "warn", f"{threads} for {cores} cores", f"set OMP_NUM_THREADS={cores} or lower")
    return Finding("threads", "ok", f"torch uses {threads}")


def look_at_kernels() -> Finding:
    """Whether the compiled kernels are used."""
    from thinwire.kernels import backend

    name = backend()
    if name == "reference":
        first = "" if find_compiler() else "install a C compiler (gcc or clang), then "
        advice = f"{first}reinstall thinwire: pip install --force-reinstall --no-deps thinwire"
        return Finding("kernels", "warn", "plain torch: right, but slow", advice)
    return Finding("kernels", "ok", f"compiled ({name})")


def look_at_triton() -> Finding:
    """Triton: only of use on GPUs."""
    import torch

    if importlib.util.find_spec("triton") is not None:
        return Finding("triton", "ok", importlib.metadata.version("triton"))
    if torch.cuda.is_available():
        return Finding("triton", "warn", "absent, though there is a GPU", "pip install 'thinwire[triton]'")
    return Finding("triton", "ok", "absent (not needed: no GPU)")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def look_at_cores() -> Finding:
    """Cores: the demo wants two."""
    cores = usable_cores()
    if cores < 2:
        return Finding(
            "cores", "warn", str(cores), "one core cannot overlap computing with communication; use two or more"
        )
    return Finding("cores", "ok", str(cores))


def find_compiler() -> str | None:
    """The path of a C compiler, if there is one."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def look_at_compiler() -> Finding:
    """A C compiler: only needed to build the kernels."""
    compiler = find_compiler()
    if compiler is None:
        return Finding("compiler", "warn", "none", "needed only to build the kernels from source: install gcc or clang")
    return Finding("compiler", "ok", compiler)


def look_at_lab() -> Finding:
    """Network namespaces: what the lab and the demo build their network of."""
    from thinwire.lab import lab_available

    available, reason = lab_available()
    if available:
        return Finding("namespaces", "ok", "root, iproute2 and shaped links work")
    return Finding("namespaces", "warn", "the lab cannot run", reason)


def _print(findings: list[Finding]) -> None:
    table = Table(title="thinwire doctor", title_justify="left")
    for column in ("", "what", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        mark = Text(finding.status, style=STYLES[finding.status])
        table.add_row(mark, Text(finding.name), Text(finding.found), Text(finding.advice))
    Console().print(table)
