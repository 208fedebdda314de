"""Runs the workers of a benchmark on the lab and brings back what rank 0 has written."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.lab import Lab

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

COLLECTIVE_TIMEOUT_S = 300


def run_workers(
    module: str,
    settings: DataclassInstance,
    rate: str,
    hosts: int,
    say: Callable[[str], None],
    env: Mapping[str, str] | None = None,
) -> Any:
    """What the JSON file says that ``python -m module --worker SETTINGS FILE``, run on every host, leaves behind."""
    with tempfile.TemporaryDirectory() as folder, Lab(hosts, rate) as lab:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, "--worker", json.dumps(asdict(settings)), str(out)]
        result = lab.run(command, env=env, on_line=lambda host, line: say(f"[host {host}] {line}"))
        if not result.ok:
            raise SystemExit(f"a worker failed with {result.exit_codes}; what it said is above")
        return json.loads(out.read_text(encoding="utf-8"))
