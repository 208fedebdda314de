"""Disks that fail inside a writer process: a module that it imports, put before ``thinwire`` on its path."""

from __future__ import annotations

import errno
from pathlib import Path

_PATCH = """
import errno, os
from thinwire.checkpoint import files
_trigger = {trigger!r}
_write, _sync = files.LocalOutput.write, files.LocalOutput.sync
def write(self, data):
    if {when!r} == "write" and os.path.exists(_trigger):
        _write(self, bytes(data)[: len(data) // 2])
        raise OSError({number}, os.strerror({number}))
    _write(self, data)
def sync(self):
    if {when!r} == "sync" and os.path.exists(_trigger):
        raise OSError({number}, os.strerror({number}))
    _sync(self)
files.LocalOutput.write, files.LocalOutput.sync = write, sync
"""


def failing_writer(monkeypatch: object, folder: Path, when: str, number: int = errno.ENOSPC) -> Path:
    """From now on writers fail while the file returned exists."""
    from thinwire.checkpoint import client

    trigger = folder / "fail-now"
    code = _PATCH.format(trigger=str(trigger), when=when, number=number)
    before, after = client._START.rsplit("; main(", 1)
    start = f"{before}; exec({code!r}); main({after}"
    monkeypatch.setattr(client, "_START", start)  # type: ignore[attr-defined]
    return trigger
