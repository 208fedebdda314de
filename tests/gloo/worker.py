"""One rank of a launch: joins the process group, runs the cases of a suite, writes one JSON line per case."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks
sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers beside the tests

import torch
import torch.distributed as dist

from gloo.support import Case, Rank


def main(suite: str, rank: str, world_size: str, scratch: str, folder: str) -> None:
    """Run the suite; a case that fails is reported and the next one is tried."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=datetime.timedelta(seconds=30),
    )
    cases: dict[str, Case] = importlib.import_module(f"gloo.{suite}").CASES
    here = Rank(int(rank), int(world_size), Path(folder))
    with (Path(scratch) / f"{rank}.jsonl").open("a", buffering=1) as report:
        for name, case in cases.items():
            try:
                line = {"case": name, "value": case(here)}
            except Exception:
                line = {"case": name, "error": traceback.format_exc()}
            report.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
