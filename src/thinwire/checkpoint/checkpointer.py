"""``Checkpointer``: recoverable points of a training loop."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint import commit, scan
from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.auto import Tuner
from thinwire.checkpoint.client import Client, wait_for_writers
from thinwire.checkpoint.files import LocalFiles
from thinwire.checkpoint.gradient_log import NOT_YET, GradientLog
from thinwire.checkpoint.load import Reader, plan_file
from thinwire.checkpoint.points import RESIDUALS, agree
from thinwire.checkpoint.ranks import Ranks
from thinwire.checkpoint.records import Record
from thinwire.checkpoint.replay import replay
from thinwire.checkpoint.snapshot import Copy
from thinwire.checkpoint.state import Stateful, TrainingState
from thinwire.checkpoint.wire_state import has_memory, without_memory
from thinwire.core import CheckpointError, ConfigError

log = logging.getLogger(__name__)
_PROGRESS = struct.Struct("<q")
_TAKEOVER_S = 120.0


@dataclass(frozen=True)
class Restored:
    """What ``restore`` has found.

    Args:
        step: training steps that are done.
        full_step: of the checkpoint that was loaded.
        replayed: log records done again after it.
        lost: steps that were done and are to be repeated; None where nobody knows.
        exact: False where residuals of the wire began at zero.
    """

    step: int
    full_step: int
    replayed: int
    lost: int | None
    exact: bool


class Checkpointer:
    """Saves while training goes on, and restores the newest point that all ranks can load.

    All ranks make one with the same arguments and call the same methods at the same steps. Use it as a context manager, or
    ``close()`` it. A *step* is a number of training steps that are done.

    Args:
        optimizer: one, several in a list, or None.
        wire: what ``thinwire.attach`` has returned, if anything.
        extra: by name, what else belongs to the training: schedulers, scalers, samplers (``state_dict`` and
            ``load_state_dict``), ``torch.Generator``s, plain dictionaries. Its position in the data, for example.
        keep: full checkpoints to keep, at least 2; more: older points stay available.
        every: steps from one full checkpoint to the next. Lower: less to repeat or replay, more to write.
        log: also log the gradients of every step, which makes every step a recoverable point.
        log_batch: log records that become durable together. Higher: cheaper, but a power failure loses so many steps.
        log_bytes: memory for log records on their way. When a slow disk fills it, the log pauses until the next full one.
        shared: all ranks see the same directory, and share the writing. False: each has a disk of its own and writes all.
        overlap: copy during the next forward and backward instead of before them.
        rng: save the global random number generators too.
        process_group: the ranks that train together; default: all.
        on_failure: called with a sentence whenever something could not be saved; it is logged as an error anyway.

    Attributes:
        restored: what the last ``restore`` found.
        last_saved: the step of the newest checkpoint known to be durable (on rank 0, which commits).
        failures: sentences, as given to ``on_failure``.

    Raises:
        CheckpointError: the directory cannot be used. Later on, failures to write never stop the training.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: object = None,
        wire: Stateful | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int = 2,
        every: int = 100,
        log: bool = False,
        log_batch: int = 1,
        log_bytes: int = 256 << 20,
        shared: bool = True,
        overlap: bool = True,
        rng: bool = True,
        process_group: dist.ProcessGroup | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        for name, value, least in (("keep", keep, 2), ("every", every, 1), ("log_batch", log_batch, 1)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")
        self._state = TrainingState(model, optimizer, wire, extra or {}, rng)
        self._ranks = Ranks(process_group)
        self._rank, self._world_size = (self._ranks.rank, self._ranks.world_size) if shared else (0, 1)
        self._root = Path(directory) if shared else Path(directory) / f"rank-{self._ranks.rank:05d}"
        self._files = LocalFiles(self._root)
        self._keep, self._every, self._overlap = keep, every, overlap
        self._flush_bytes = 32 << 20
        self._on_failure = on_failure
        self.failures: list[str] = []
        self.last_saved: int | None = None
        self.restored: Restored | None = None
        self._copy: Copy | None = None
        self._tuner: Tuner | None = None
        self._step, self._chain, self._wants_base = 0, names.START, log
        self._closed, self._told = False, ""
        self._log_needs: int | None = None  # the full checkpoint without which the log leads nowhere
        self._run = self._prepare()
        self._client = Client(self._root, self._rank, log_bytes if log else 0)
        self._log = None
        if log:
            self._log = GradientLog(
                self._state, self._client, self._rank, holds_gradients=self._rank == 0, batch=log_batch
            )
            _observe(wire, self._log)
        self._handles = [one.register_step_pre_hook(self._before_step) for one in self._state.optimizers]
        self._handles += [one.register_step_post_hook(self._after_step) for one in self._state.optimizers]
        self._progress = _Progress(self._root / f"progress-rank-{self._rank:05d}")

    @classmethod
    def auto(
        cls,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: object = None,
        wire: Stateful | None = None,
        *,
        max_overhead: float = 0.035,
        mtbf_s: float = 3600.0,
        **settings: Any,
    ) -> Checkpointer:
        """One that measures the first steps, then picks the interval itself and logs why.

        Args:
            max_overhead: the most that checkpoints may add to training time.
            mtbf_s: mean time between failures of the whole job.
            settings: as for ``Checkpointer``, without ``every``.
        """
        if not 0 < max_overhead < 1 or mtbf_s <= 0:
            raise ConfigError(f"max_overhead is {max_overhead} and mtbf_s {mtbf_s}; expected a share and seconds")
        made = cls(directory, model, optimizer, wire, every=1 << 30, **settings)
        made._tuner = Tuner(max_overhead=max_overhead, mtbf_s=mtbf_s, log="log" in settings and settings["log"])
        return made

    @property
    def every(self) -> int:
        """Steps from one full checkpoint to the next."""
        return self._every

    def maybe_save(self, step: int) -> None:
        """After every step: logs it if there is a log, and saves if it is time. Never raises because of a disk.

        A checkpoint that is due while the last one is still being written is left out, and said so: memory stays bounded.
        """
        self._advance(step)
        self._hear()
        due = step % self._every == 0 or self._wants_base or (self._world_size == 1 and self._log_is_broken())
        if self._tuner is not None and self._tuner.wants_full(step):
            due = True
        if due:
            free = self._client.busy is None and self._copy is None and not self._client.dead
            if self._ranks.all_true(free):
                self._begin_full(step)
            elif step % self._every == 0:
                self._fail(f"the checkpoint of step {step} is left out: the one before is still being written; {_SLOW}")
        if self._tuner is not None:
            self._tune(step)

    def save(self, step: int) -> None:
        """Save now; returns when the checkpoint survives a crash.

        Raises:
            CheckpointError: it could not be written; the one before is still there.
        """
        self._advance(step)
        self.wait()
        before = len(self.failures)
        if self._ranks.all_true(not self._client.dead):
            self._begin_full(step, overlap=False)
            self.wait()
        saved, why = self._ranks.of_rank_0([self.last_saved == step, self.failures[before:][-1:]])
        if not saved:
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {why[0] if why else 'no writer'}")

    def restore(self, step: int | None = None, *, residuals: Literal["exact", "fast"] = "exact") -> int:
        """Continue from the newest point that all ranks can load; returns its step, 0 where there is none.

        Args:
            step: an older point instead.
            residuals: where a wire has residuals, ``"exact"`` goes back to a full checkpoint, which holds them; ``"fast"``
                replays the log to its end and lets them begin at zero.

        Raises:
            CheckpointError: the point wanted is not there, or belongs to another model. Nothing has changed then.
        """
        if residuals not in ("exact", "fast"):
            raise ConfigError(f"residuals is {residuals!r}, expected 'exact' or 'fast'")
        self.wait()
        reader = Reader()
        lines = scan.lines(self._files, self._rank, reader.check)
        found = agree(lines, self._ranks, step=step, exact=residuals == "exact")
        if found is None:
            if step is not None:
                raise CheckpointError(
                    f"no point of step {step} can be loaded; see: thinwire checkpoint ls {self._root}"
                )
            if scan.fulls(self._files):
                log.error("no checkpoint in %s can be loaded by all ranks; starting from the beginning", self._root)
            return 0
        line, count = found
        replicated, local = reader.load(self._files, line.manifest, self._rank)
        self._state.check(replicated, local)
        exact = self._load_wire(local.get("wire"), line, count)
        self._state.apply(replicated, local)
        records = line.records[:count]
        tail = replay(self._files, records, self._own(records), self._state)
        if tail is not None and self._state.wire is not None and local.get("wire") is not None:
            self._state.wire.load_state_dict(without_memory(local["wire"], tail.get("wire_index"), forget=not exact))
        self._step = records[-1].step if records else line.manifest.step
        self._chain = line.chains[count]
        (furthest,) = self._ranks.largest(self._progress.found)
        lost = max(int(furthest) - self._step, 0) if furthest >= 0 else None
        self.restored = Restored(self._step, line.manifest.step, count, lost, exact)
        self._wants_base = self._log is not None
        if self._ranks.rank == 0:
            log.info("restored step %d: checkpoint of step %d and %d log records; %s steps lost%s", self._step,
                     line.manifest.step, count, lost, "" if exact else "; residuals begin at zero")  # fmt: skip
        return self._step

    def wait(self) -> None:
        """Until all that was handed over is durable, or known to be lost."""
        self._join_copy()
        while self._client.pending and not self._client.dead:
            self._hear(timeout_s=0.5)
        self._hear()

    def state_dict(self) -> dict[str, Any]:
        """All of the training state, so that it can be nested in a state dict of ``torch.distributed.checkpoint``."""
        return {"step": self._step, "replicated": self._state.replicated(), "local": self._state.local()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        self._join_copy()
        self._state.check(state["replicated"], state["local"])
        if self._state.wire is not None and "wire" in state["local"]:
            self._state.wire.load_state_dict(state["local"]["wire"])
        self._state.apply(state["replicated"], state["local"])
        self._step, self._wants_base = state["step"], self._log is not None

    def close(self) -> None:
        """Finish writing, end the writer process, remove all hooks."""
        if not self._closed:
            self._closed = True
            self.wait()
            for handle in self._handles:
                handle.remove()
            if self._log is not None:
                self._log.detach()
            self._client.close()
            self._progress.close()
            self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> str:
        """Wait for the writers of an earlier run, sweep up after them, name this run. Rank 0 decides for all."""
        error, coordinates = "", self._rank == 0
        if coordinates:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                wait_for_writers(self._root, _TAKEOVER_S)
                for name in commit.sweep(self._files):
                    log.info("%s was never finished and is removed", name)
            except OSError as failure:
                error = f"{self._root} cannot be used ({failure}); give a directory that can be written to"
        answers = self._ranks.gather([secrets.token_hex(8), error])
        errors = [error for _, error in answers if error]
        if errors:
            raise CheckpointError(errors[0])
        run: str = answers[0][0]
        return run

    def _advance(self, step: int) -> None:
        if step < self._step or step < 0:
            raise ConfigError(f"step is {step} after {self._step}; expected the number of steps done, which only grows")
        if step > self._step:
            before, self._chain = self._chain, names.next_chain(self._chain, self._run, step)
            self._step = step
            if self._log is not None:
                self._log.record(step, before, self._chain)
                self._tell_if_broken(step)
        self._progress.set(step)

    def _begin_full(self, step: int, *, overlap: bool = True) -> None:
        replicated, local = self._state.replicated(), self._state.local()
        layout, tensors = plan_file(replicated, local, self._rank, self._world_size)
        arena = self._client.full_arena(layout.total_bytes)
        job = {
            "step": step, "chain": self._chain, "run": self._run, "rank": self._rank, "world_size": self._world_size,
            "fingerprint": self._state.fingerprint, "keep": self._keep, "flush_bytes": self._flush_bytes,
            "timeout_s": 600.0, "info": self._info(local),
        }  # fmt: skip
        later = ("replicated", "local/wire/tensors")  # a wire never writes into a state tensor
        now = [name for name in tensors if not name.startswith(later)]
        self._client.busy = step
        self._wants_base = False
        if self._log is not None:
            self._log_needs = step if self._log.broken else self._log_needs
            self._log.begin(step, self._run)
        client, size = self._client, layout.total_bytes
        copy = Copy(arena, layout, tensors, now, lambda: client.send_full(job, size))
        self._copy = copy
        if overlap and self._overlap:
            copy.start()
        else:
            copy.run()
            self._join_copy()

    def _info(self, local: Mapping[str, Any]) -> dict[str, str]:
        info = {"torch": torch.__version__, "python": platform.python_version(), "host": platform.node()}
        if self._state.wire is not None:
            info["wire"] = RESIDUALS if has_memory(local["wire"]) else "none"
        return info

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._join_copy()
        if self._tuner is not None:
            self._tuner.optimizer_begins()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._tuner is not None:
            self._tuner.optimizer_ends()

    def _join_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            error = copy.join()
            if error:
                step, self._client.busy = self._client.busy, None
                self._overlap = False
                self._lost(step)
                self._fail(f"the checkpoint of step {step} is dropped: {error}")

    def _hear(self, timeout_s: float = 0.0) -> None:
        for answer in self._client.answers(timeout_s):
            kind, step, error = answer["kind"], answer["step"], answer.get("error")
            if kind == "full" and not error:
                self.last_saved = step
                log.debug("the checkpoint of step %d is durable after %.2f s", step, answer["seconds"])
            if self._tuner is not None:
                self._tuner.heard(answer)
            if error and kind == "log" and self._log is not None:
                self._log.broken = self._log.broken or error
                self._tell_if_broken(step)
            elif error:
                self._lost(step)
                kept = "none yet" if self.last_saved is None else f"step {self.last_saved}"
                self._fail(f"the checkpoint of step {step} was not saved: {error}; the one before stays ({kept})")

    def _lost(self, step: int | None) -> None:
        """A checkpoint was not saved. A log that was whole before it still continues the one before that."""
        if self._log is not None and step == self._log_needs:
            self._log.broken = self._log.broken or "the checkpoint that it continues was not saved"

    def _log_is_broken(self) -> bool:
        return self._log is not None and bool(self._log.broken) and self._client.busy is None

    def _tell_if_broken(self, step: int) -> None:
        """Once per reason; before the first full checkpoint there is none to tell."""
        assert self._log is not None
        if self._log.broken not in ("", NOT_YET, self._told):
            self._fail(f"the log ends before step {step}: {self._log.broken}; {_NEXT}")
        self._told = self._log.broken

    def _fail(self, sentence: str) -> None:
        self.failures.append(sentence)
        log.error("%s", sentence)
        if self._on_failure is not None:
            self._on_failure(sentence)

    def _tune(self, step: int) -> None:
        assert self._tuner is not None
        chosen = self._tuner.step(step, self._ranks)
        if chosen is not None:
            self._every, self._flush_bytes = chosen.every, chosen.flush_bytes
            if self._log is not None:
                self._log.batch = chosen.log_batch
            self._tuner = None
            if self._ranks.rank == 0:
                log.info("checkpoints: %s", chosen.why)

    def _load_wire(self, saved: Any, line: scan.Line, count: int) -> bool:
        """The wire's state, before anything else changes: it may refuse. Whether all of it will be as it was."""
        wire = self._state.wire
        if wire is None:
            return True
        if saved is None or self._rank >= line.manifest.world_size:
            log.warning(
                "the checkpoint of step %d has no wire state for this rank: residuals begin at zero", line.manifest.step
            )
            return False
        if saved.get("world_size") != self._ranks.world_size:
            log.warning("saved by %s ranks, restored by %d: residuals begin at zero", saved.get("world_size"),
                        self._ranks.world_size)  # fmt: skip
            return False
        wire.load_state_dict(saved)
        return count == 0 or not has_memory(saved)

    def _own(self, records: tuple[Record, ...]) -> list[Record]:
        """This rank's records of the same steps; rank 0's where it has none."""
        if self._rank == 0 or not records:
            return list(records)
        mine = {record.after: record for one in scan.logs(self._files, self._rank) for record in one.records}
        return [mine.get(record.after, record) for record in records]


_NEXT = "it goes on with the next full checkpoint"
_SLOW = "a longer interval (every=), a faster disk, or more ranks to share the writing would help"


class _Progress:
    """How far a rank has come, for the next run to say what was lost. In the page cache: it survives a killed process."""

    def __init__(self, path: Path) -> None:
        self.found = -1
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            data = os.pread(self._fd, _PROGRESS.size, 0)
            self.found = _PROGRESS.unpack(data)[0] if len(data) == _PROGRESS.size else -1
        except OSError as error:
            log.warning("%s cannot be written (%s); how many steps a failure costs will not be known", path, error)

    def set(self, step: int) -> None:
        if self._fd >= 0:
            try:
                os.pwrite(self._fd, _PROGRESS.pack(step), 0)
            except OSError:
                self.close()  # a full disk: only the number of steps lost is unknown

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _observe(wire: Any, gradient_log: GradientLog) -> None:
    """A wire's transactions are counted by an observer like any other."""
    gradients = getattr(wire, "_gradients", None)
    if gradients is not None:
        gradients.observers.add(gradient_log.wire_index)
        gradient_log.wire_index.index = gradients.channel.index
