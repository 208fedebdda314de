"""``thinwire checkpoint``: what a checkpoint directory holds, whether it is whole, and how to clean it up. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from thinwire.checkpoint.scan import Finding

app = typer.Typer(help="Look at, verify and repair checkpoint directories.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="A checkpoint directory.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DAMAGED_STATUS = 1


@app.command("ls")
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List what is there without reading the tensors."""
    from thinwire.checkpoint import manifest as names
    from thinwire.checkpoint import scan
    from thinwire.checkpoint.sealed import Damaged

    files, rows = _files(directory), list[dict[str, Any]]()
    for step in sorted(scan.fulls(files)):
        try:
            found = scan.read_manifest(files, step)
            rows.append({"name": names.step_name(step), "kind": "full", "step": step, "bytes": found.total_bytes,
                         "ranks": found.world_size, "run": found.run, "damage": ""})  # fmt: skip
        except Damaged as damage:
            rows.append({"name": names.step_name(step), "kind": "full", "step": step, "damage": str(damage)})
    for name in files.names():
        log = names.log_of(name)
        if log is not None:
            rows.append({"name": name, "kind": "log", "step": log[0], "bytes": files.size(name), "run": log[1],
                         "damage": ""})  # fmt: skip
        elif names.is_temporary(name):
            rows.append({"name": name, "kind": "temporary", "damage": ""})
    _print(rows, as_json, ("name", "kind", "step", "bytes", "ranks", "damage"))


@app.command("verify")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Read every byte, check it, and say which points can be restored. Status 1 if anything is damaged."""
    from thinwire.checkpoint import scan

    files = _files(directory)
    findings = scan.survey(files)
    rows = [_row(one) for one in findings]
    newest = max((line.last_step for line in scan.lines(files, 0)), default=None)
    if as_json:
        typer.echo(json.dumps({"newest_point": newest, "found": rows}, indent=2))
    else:
        _print(rows, False, ("name", "kind", "state", "detail"))
        Console().print(Text("nothing can be restored" if newest is None else f"newest point: step {newest}"))
    if any(one.damage for one in findings):
        raise typer.Exit(DAMAGED_STATUS)


@app.command("inspect")
def inspect(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Of which checkpoint; default: the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the tensors and settings of one checkpoint."""
    from thinwire.checkpoint import manifest as names
    from thinwire.checkpoint import scan
    from thinwire.checkpoint.sealed import MAX_JSON_BYTES, Damaged
    from thinwire.checkpoint.tensors import read_header

    files = _files(directory)
    steps = scan.fulls(files)
    if not steps:
        _refuse(f"{directory} has no checkpoint")
    chosen = steps[0] if step is None else step
    try:
        manifest = scan.read_manifest(files, chosen)
        rows = []
        for name, shard in manifest.files.items():
            path = f"{names.step_name(chosen)}/{name}"
            head = files.read(path, 0, min(shard.size, MAX_JSON_BYTES + 8))
            entries, _ = read_header(head, shard.size, path)
            rows += [{"tensor": key, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.size, "file": name}
                     for key, e in sorted(entries.items())]  # fmt: skip
    except (Damaged, OSError) as error:
        _refuse(str(error))
    about = {"step": manifest.step, "run": manifest.run, "ranks": manifest.world_size, "bytes": manifest.total_bytes,
             "fingerprint": manifest.fingerprint, **manifest.info}  # fmt: skip
    if as_json:
        typer.echo(json.dumps({**about, "tensors": rows}, indent=2))
        return
    for key, value in about.items():
        Console().print(Text(f"{key}: {value}"))
    _print(rows, False, ("tensor", "dtype", "shape", "bytes", "file"))


@app.command("repair")
def repair(
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move what is damaged to DIR/damaged, cut torn log tails, remove unfinished leftovers. Never while a run writes."""
    from thinwire.checkpoint.repair import plan_repair
    from thinwire.checkpoint.repair import repair as run

    files = _files(directory)
    try:
        actions = run(files) if yes else plan_repair(files)
    except OSError as error:
        _refuse(str(error))
    rows = [{"name": one.name, "action": one.action, "why": one.why} for one in actions]
    if as_json:
        typer.echo(json.dumps({"done": yes, "actions": rows}, indent=2))
        return
    if not rows:
        Console().print("nothing to repair")
        return
    _print(rows, False, ("name", "action", "why"))
    if not yes:
        Console().print("nothing was changed; add --yes to do it")


def _files(directory: Path) -> Any:
    from thinwire.checkpoint.files import LocalFiles

    if not directory.is_dir():
        _refuse(f"{directory} is no directory; give one that a Checkpointer has written to")
    return LocalFiles(directory)


def _refuse(sentence: str) -> Any:
    Console(stderr=True).print(Text(sentence, style="red"))
    raise typer.Exit(2)


def _row(finding: Finding) -> dict[str, Any]:
    detail = ""
    if finding.manifest is not None:
        detail = f"{finding.manifest.total_bytes} bytes of {finding.manifest.world_size} ranks"
    elif finding.log is not None:
        torn = f", torn tail of {finding.log.torn_bytes} bytes" if finding.log.torn_bytes else ""
        steps = [record.step for record in finding.log.records]
        detail = f"steps {steps[0]} to {steps[-1]}{torn}" if steps else f"no records{torn}"
    state = "damaged" if finding.damage else "unfinished" if finding.kind == "temporary" else "ok"
    return {"name": finding.name, "kind": finding.kind, "state": state, "detail": finding.damage or detail}


def _print(rows: list[dict[str, Any]], as_json: bool, columns: tuple[str, ...]) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in ("step", "bytes", "ranks") else "left", overflow="fold")
    for row in rows:
        damaged = bool(row.get("damage")) or row.get("state") == "damaged"
        cells = (Text(str(row.get(column, ""))) for column in columns)
        table.add_row(*cells, style="red" if damaged else "")
    Console().print(table)
