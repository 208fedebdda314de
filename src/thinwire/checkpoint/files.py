"""The few file operations that checkpoints use, behind a protocol: tests put a file system there that forgets.

Only these operations exist, so what can be lost in a crash can be enumerated (``tests/checkpoint/forgetful.py``). No torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Output(Protocol):
    """A file that is being written, from its end on."""

    def write(self, data: Buffer) -> None:
        """All of it; it may still be lost in a crash."""

    def sync(self) -> None:
        """What was written survives a crash from here on. Says nothing about the file's name."""

    def close(self) -> None: ...


class Files(Protocol):
    """Paths are relative to one directory, with ``/``."""

    def create(self, path: str) -> Output:
        """A new file; FileExistsError if there is one."""

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes: ...

    def view(self, path: str) -> memoryview:
        """A whole file without a copy of it. What others change in it meanwhile may be seen."""

    def size(self, path: str) -> int: ...

    def names(self, path: str = "") -> list[str]:
        """What a directory holds; nothing if there is none."""

    def make_directory(self, path: str) -> None:
        """No error if it exists: ranks share it."""

    def rename(self, old: str, new: str) -> None:
        """Atomic. Directories only onto names that nobody has."""

    def sync_directory(self, path: str = "") -> None:
        """Names made, changed and removed in it survive a crash from here on."""

    def remove(self, path: str) -> None:
        """A file, or a directory with all that is in it; no error if it is gone."""


class LocalOutput:
    """A file of the operating system, unbuffered: ``write`` either hands everything over or raises."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def write(self, data: Buffer) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalFiles:
    """A directory of the operating system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def create(self, path: str) -> LocalOutput:
        return LocalOutput(self.root / path, os.O_CREAT | os.O_EXCL)

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        with (self.root / path).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size)

    def view(self, path: str) -> memoryview:
        with (self.root / path).open("rb", buffering=0) as file:
            # A private copy on write: tensors over it may be written to, and the file never is.
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b"")

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_directory(self, path: str) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        if (self.root / old).is_dir() and (self.root / new).exists():  # Linux replaces a directory that is empty
            raise FileExistsError(errno.EEXIST, "a directory of this name exists", str(self.root / new))
        (self.root / old).rename(self.root / new)

    def sync_directory(self, path: str = "") -> None:
        fd = os.open(self.root / path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        whole = self.root / path
        if whole.is_dir() and not whole.is_symlink():
            shutil.rmtree(whole, ignore_errors=True)
        else:
            whole.unlink(missing_ok=True)
