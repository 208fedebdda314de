"""What was measured, as Markdown, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.sparsifiers import bars
from benchmarks.sparsifiers.studies import EnergyKept, RowsMissing, TensorsMissing


@dataclass(frozen=True)
class Measured:
    """All results of one model.

    Args:
        ignored_steps: of the measured ones, left out of means: residuals have to fill first.
        budget_bytes: what the methods are fitted to.
    """

    task: str
    before: int
    steps: int
    ignored_steps: int
    density: float
    budget_bytes: int
    dense_bytes: int
    rows: list[RowsMissing]
    tensors: list[TensorsMissing]
    energy: list[EnergyKept]


def write(measured: Sequence[Measured], folder: Path) -> str:
    """Write ``results.md``, ``results.json`` and ``energy.svg``; the Markdown text is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(markdown(one) for one in measured)
    (folder / "results.md").write_text(text, encoding="utf-8")
    rows = [asdict(one) for one in measured]
    (folder / "results.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "energy.svg").write_text(picture(measured), encoding="utf-8")
    return text


def picture(measured: Sequence[Measured]) -> str:
    """Energy kept as bars, in the order of the first model."""
    series = {one.task: {row.label: row.kept for row in one.energy} for one in measured}
    ordered = {name: dict(sorted(kept.items(), key=lambda one: -one[1])) for name, kept in series.items()}
    return bars.picture("Energy kept at equal bytes", ordered)


def markdown(one: Measured) -> str:
    """The three tables of a model."""
    about = (
        f"4 workers, {one.before} steps of training, then {one.steps} measured ones; means over the last "
        f"{one.steps - one.ignored_steps}.\n"
    )
    parts = [f"## {one.task}\n", about, _rows(one), _tensors(one), _energy(one)]
    return "\n".join(parts)


def _rows(one: Measured) -> str:
    specs = list(one.rows[0].missing)
    rows = [
        [f"`{row.tensor}`", f"{row.rows} × {row.row_elems}", *(_percent(row.missing[spec]) for spec in specs)]
        for row in one.rows
    ]
    means = [_percent(fmean(row.missing[spec] for row in one.rows)) for spec in specs]
    head = ["weight", "rows × length", *(f"`{spec}`" for spec in specs)]
    return f"### Rows of which nothing arrives\n\n{table(head, [*rows, ['mean over the weights', '', *means]])}"


def _tensors(one: Measured) -> str:
    rows = [
        [_degree(row), _percent(row.missing), f"{row.longest_wait} steps", f"{row.kept:.3f}"] for row in one.tensors
    ]
    head = [f"top-k at density {one.density} over", "tensors missing per step", "longest wait", "energy kept"]
    return f"### Tensors of which nothing arrives\n\n{table(head, rows)}"


def _degree(row: TensorsMissing) -> str:
    if row.degree == 1:
        return "each tensor (segmented)"
    return f"all {row.degree} at once" if row.groups == 1 else f"{row.degree} tensors at once"


def _energy(one: Measured) -> str:
    rows = [_energy_row(row, one.budget_bytes) for row in one.energy]
    head = ["method", "spec", "bytes", "kept, first step", "kept", "lag"]
    about = (
        f"The budget is {one.budget_bytes / 1000:.1f} kB per rank and step (dense: {one.dense_bytes / 1e6:.2f} MB); bytes "
        "really sent are given as a multiple of it.\n"
    )
    return f"### Energy kept at equal bytes\n\n{about}\n{table(head, rows)}"


def _energy_row(row: EnergyKept, budget_bytes: int) -> list[str]:
    lag = "" if row.lag is None else f"{row.lag:.3f}"
    spec = "`" + row.spec.replace("|", "\\|") + "`"
    sent = f"{row.sent_bytes / budget_bytes:.2f}" + ("*" if row.varies else "")
    return [row.label, spec, sent, f"{row.kept_first:.3f}", f"{row.kept:.3f}", lag]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
