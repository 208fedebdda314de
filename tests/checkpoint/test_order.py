"""The order of system calls, as the kernel sees it: data before names, names before the commit, that before deleting."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STRACE = shutil.which("strace")
_CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from checkpoint.workloads import Run
from thinwire.checkpoint.files import LocalFiles
run = Run(LocalFiles(sys.argv[1]), "a" * 16)
for _ in range(3):
    run.advance(); run.save()
"""


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_syncs_come_in_order(tmp_path: Path) -> None:
    root, trace = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    calls = "trace=openat,write,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,close"
    tests = str(Path(__file__).parents[1])
    command = [str(STRACE), "-f", "-y", "-e", calls, "-o", str(trace), sys.executable, "-c", _CHILD, str(root), tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("ptrace is not allowed here")
    assert done.returncode == 0, done.stderr
    events = [event for line in trace.read_text().splitlines() if (event := _event(line, root))]
    for step in (1, 2, 3):
        temporary = f"step-{step:08d}.tmp-{'a' * 16}"
        order = [
            f"write {temporary}/rank-00000.safetensors",
            f"fsync {temporary}/rank-00000.safetensors",
            f"write {temporary}/MANIFEST.json.tmp",
            f"fsync {temporary}/MANIFEST.json.tmp",
            f"rename {temporary}/MANIFEST.json",
            f"fsync {temporary}",
            f"rename step-{step:08d}",
            "fsync .",
        ]
        at = events.index(order[0])
        for expected in order:
            assert expected in events[at:], f"{expected} is missing or too early"
            at = events.index(expected, at)
    removed = next(index for index, event in enumerate(events) if event.startswith("remove step-00000001"))
    committed = events.index("rename step-00000003")
    assert committed < events.index("fsync .", committed) < removed


def _event(line: str, root: Path) -> str:
    """``write path``, ``fsync path``, ``rename new`` or ``remove path``, relative to the directory."""
    match = re.match(r"\d+ +(\w+)\((.*)\) += 0|\d+ +(write)\((.*)\) += \d+", line)
    if match is None or str(root) not in line:
        return ""
    call, rest = match[1] or match[3], match[2] or match[4]
    paths = re.findall(re.escape(str(root)) + r"(?:/([^\">]*))?[\">]", rest)
    if not paths or call not in ("write", "fsync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"):
        return ""
    if call.startswith("rename"):
        return f"rename {paths[-1]}"
    if call.startswith(("unlink", "rmdir")):
        inside = re.findall(r', "([^"]*)"', rest)[:1]  # unlinkat: a directory, then a name in it
        return "remove " + "/".join(filter(None, [*paths, *inside]))
    return f"{call} {paths[0] or '.'}"
