"""The tutorial, followed literally: its files, its commands, and what it says the reader sees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.lab import lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/first-run.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```python title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL))
SET_UP = ("make setup", "source .venv/bin/activate")
COMMANDS = [
    row
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for row in block.splitlines()
    if row not in SET_UP
]


@pytest.mark.timeout(300)
def test_the_tutorial_reaches_its_end(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # As an activated environment; thinwire is this one, wherever the tests were started.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"}
    said = {}
    for command in COMMANDS:
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=140
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command] = done.stdout
    doctor, dense, thin, report = said.values()
    assert "root, iproute2 and shaped links work" in doctor
    assert _step_s(thin) < _step_s(dense) / 2, "the tutorial promises a faster step"
    assert "int4, fuse=" in thin
    assert "chose int4" in report
    assert (tmp_path / "report.html").exists()


def _step_s(output: str) -> float:
    """The last step that rank 0 printed."""
    return float(re.findall(r"step 60: loss [\d.]+, ([\d.]+) s", output)[-1])
