"""Runs as TensorBoard scalars (optional: ``pip install 'thinwire[tensorboard]'``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.observe.runs import Contest, Run

STEP_SCALARS = ("step_s", "sent_bytes", "wire_bytes", "wait_s", "encode_s", "wire_s", "decode_s")


def write_tensorboard(contests: Sequence[Contest], directory: Path) -> None:
    """Write one TensorBoard log per run below ``directory``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is not installed: pip install 'thinwire[tensorboard]'") from error
    for contest in contests:
        for run in contest.runs:
            with SummaryWriter(str(directory / contest.directory.name / run.directory.name)) as writer:
                for tag, value, step in scalars(run):
                    writer.add_scalar(tag, value, step)


def scalars(run: Run) -> Iterator[tuple[str, float, int]]:
    """Yield ``(tag, value, step)`` of everything worth plotting; per-step figures are rank 0's, losses the mean."""
    for point in run.training_loss():
        yield "loss/training", point.loss, point.step
    for point in run.evaluations():
        yield "loss/evaluation", point.loss, point.step
    for event in run.ranks[0]:
        if event["kind"] == "step":
            for field in STEP_SCALARS:
                if field in event:
                    yield f"step/{field}", float(event[field]), event["step"]
