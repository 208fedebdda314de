"""``python -m benchmarks.checkpoint NAME``: what checkpoints cost, and what survives.

Every command prints one line of JSON per result, with its n; ``--out`` appends them to a file too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help=__doc__)
Out = Annotated[Path | None, typer.Option(help="Append results to this file.")]


@app.command()
def slowdown(
    every: int = 10, blocks: int = 5, steps: int = 10, sequences: int = 4, threads: int = 1, compress: str = "",
    only: Annotated[list[str] | None, typer.Option(help="Some contestants; default: all.")] = None, out: Out = None,
) -> None:  # fmt: skip
    """Training time added by checkpoints, thinwire and torch's own in turns with no checkpoints."""
    import torch.distributed as dist
    from benchmarks.checkpoint.slowdown import CONTESTANTS, measure

    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    settings = {"blocks": blocks, "steps": steps, "sequences": sequences, "threads": threads, "compress": compress}
    for name in only or CONTESTANTS:
        _say(measure(name, every=every, **settings), out)  # type: ignore[arg-type]
    dist.destroy_process_group()


@app.command()
def kills(
    ranks: int = 4, n: int = 20, steps: int = 400, seed: int = 0, compress: str = "dense", every: int = 50,
    out: Out = None,
) -> None:  # fmt: skip
    """Random SIGKILLs of random ranks under torchrun; final weights against those of an undisturbed run."""
    from benchmarks.checkpoint.rank_kills import campaign

    _say(campaign(ranks=ranks, kills=n, steps=steps, seed=seed, compress=compress, every=every), out)


@app.command()
def sigkill(n: int = 1000, trainers: int = 20, seed: int = 0, out: Out = None) -> None:
    """SIGKILL while saving."""
    from benchmarks.checkpoint import sigkill as campaign

    _say(campaign.writers(n, seed), out)
    _say(campaign.trainers(trainers, seed), out)


@app.command()
def flips(n: int = 1000, seed: int = 0, out: Out = None) -> None:
    """Bit flips, truncations, swapped, stale, duplicated and missing files."""
    from benchmarks.checkpoint import flips as campaign

    results = [
        *campaign.thinwire_damage(n, seed),
        campaign.torch_save_flips(n, seed),
        campaign.safetensors_flips(n, seed),
    ]
    for result in results:
        if result is not None:
            _say(result, out)


@app.command()
def crashes(seeds: int = 5, out: Out = None) -> None:
    """Simulated crash states: how many were checked, how many violations."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from checkpoint.test_crashes import crash_everywhere
    from checkpoint.workloads import WORKLOADS

    for name in WORKLOADS:
        checked = [crash_everywhere(name, seed) for seed in range(seeds)]
        states, wrong = sum(s for _, s, _ in checked), sum(len(v) for _, _, v in checked)
        _say({"workload": name, "operations": checked[0][0], "states": states, "violations": wrong}, out)


@app.command()
def restore(n: int = 7, out: Out = None) -> None:
    """Seconds to get the state back, against DCP and torch.load."""
    from benchmarks.checkpoint.restoring import restores

    for one in restores(n):
        _say(one, out)


@app.command()
def flush(megabytes: int = 256, n: int = 5, out: Out = None) -> None:
    """The flush curve: writing and syncing in pieces of different sizes."""
    from benchmarks.checkpoint.restoring import flushes

    for one in flushes(megabytes << 20, [size << 20 for size in (4, 8, 16, 32, 64, 128)], n):
        _say(one, out)


logging.getLogger("thinwire").setLevel(logging.CRITICAL)  # damage is what is tried here


def _say(result: Any, out: Path | None) -> None:
    line = json.dumps(result if isinstance(result, dict) else dataclasses.asdict(result))
    typer.echo(line)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    app()
