"""Imports go downward only, the core knows no network, and importing does no work."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
# From the bottom up. A package may import those on lower lines, and itself.
LAYERS = (
    {"core", "lab"},
    {"kernels"},
    {"formats"},
    {"compressors"},
    {"wrappers"},
    {"fusion"},
    {"comm"},
    {"observe"},
    {"exchange"},
    {"plan"},
    {"engine"},
    {"optim", "amp"},
    {"sync"},
    {"autopilot"},
    {"checkpoint"},
    {"wire"},
    {"api"},
    {"integrations"},
    {"demo"},
    {"cli"},
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imports_of(path: Path) -> Iterator[str]:
    """Every absolute module name imported anywhere in the file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ("thinwire.api" if alias.name == "thinwire" else alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _package(module: str) -> str | None:
    """The package of thinwire that a module belongs to; None for others. Public names are found through ``api``."""
    parts = module.split(".")
    if parts[0] != "thinwire" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return parts[1] if (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists() else "api"


def test_every_package_has_a_place() -> None:
    packages = {source.split("/")[0] for source in SOURCES}
    assert packages <= HEIGHT.keys(), f"give {packages - HEIGHT.keys()} a line in LAYERS"


@pytest.mark.parametrize("source", SOURCES)
def test_imports_go_down(source: str) -> None:
    own = source.split("/")[0]
    used = {package for package in map(_package, imports_of(ROOT / source)) if package not in (None, own)}
    upward = {package for package in used if package is not None and HEIGHT[package] >= HEIGHT[own]}
    assert not upward, f"{source} imports {sorted(upward)} from beside or above"


@pytest.mark.parametrize("source", [source for source in SOURCES if source.split("/")[0] in ("core", "kernels")])
def test_core_and_kernels_know_no_network(source: str) -> None:
    assert not [module for module in imports_of(ROOT / source) if module.startswith("torch.distributed")]


@pytest.mark.parametrize("source", [source for source in SOURCES if source.split("/")[0] not in ("cli", "demo", "lab")])
def test_library_code_does_not_print_or_read_the_environment(source: str) -> None:
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    environment = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not environment or source.startswith(("observe/", "kernels/native/"))


_IDLE = """
import sys, threading
before = threading.active_count()
import thinwire
assert "torch" not in sys.modules, "the bare import must not load torch"
thinwire.attach
import torch
assert threading.active_count() == before, threading.enumerate()
assert not torch.distributed.is_initialized()
state = torch.get_rng_state()
import thinwire.engine, thinwire.comm, thinwire.kernels, thinwire.observe
assert torch.equal(state, torch.get_rng_state())
assert threading.active_count() == before
assert not [name for name in sys.modules if name.startswith("triton.")], "triton compiles at first use, not at import"
"""


def test_import_does_no_work() -> None:
    done = subprocess.run([sys.executable, "-c", _IDLE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_import_writes_nothing_and_starts_nothing(tmp_path: Path) -> None:
    """No native build, no cache, no child process: the audit hook would see them."""
    watch = (
        "import sys\n"
        "import torch\n"
        "seen = []\n"
        "def hook(event, args):\n"
        "    if event in ('subprocess.Popen', 'os.fork', 'os.posix_spawn', 'socket.bind', 'socket.connect'):\n"
        "        seen.append((event, args))\n"
        "    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):\n"
        "        seen.append((event, args))\n"
        "sys.addaudithook(hook)\n"
        "import thinwire\n"
        "thinwire.attach\n"
        "assert not seen, seen\n"
    )
    command = [sys.executable, "-B", "-c", watch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


_PRIVATE = re.compile(
    r"\b(anew|whoever|in turns(?!\])|of then|(?:stand|stands|stood) still|wish(?:es|ed)?|books?|booked|riding|on board"
    r"|ow(?:e|es|ed)|(?<!\()quiet|course)\b"
)


@pytest.mark.parametrize("source", SOURCES)
def test_no_private_words(source: str) -> None:
    """The field's words: a residual is not owed, and a plan is no course (design, section 10)."""
    assert not _PRIVATE.findall((ROOT / source).read_text(encoding="utf-8"))
