"""A file system in memory that remembers what was synced, and lists every state that a crash may leave behind.

What POSIX promises and no more: data of a file is durable after its sync, names in a directory after the directory's sync.
Until then each change of a name may have happened or not, in any combination, and un-synced data may be there, missing, cut
off, or replaced by zeros.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Name = tuple[str, str, int | None]  # what, name, inode
DATA_VARIANTS = ("lost", "written", "torn", "zeros")
_ALL_SUBSETS_UP_TO = 6
_SAMPLED = 24


@dataclass
class Inode:
    """A file or a directory, as it is and as it would be after a crash."""

    directory: bool
    data: bytes = b""
    synced: bytes = b""
    entries: dict[str, int] = field(default_factory=dict)
    synced_entries: dict[str, int] = field(default_factory=dict)
    pending: list[Name] = field(default_factory=list)

    def copy(self) -> Inode:
        return Inode(
            self.directory, self.data, self.synced, dict(self.entries), dict(self.synced_entries), list(self.pending)
        )


class ForgetfulFiles:
    """Implements ``thinwire.checkpoint.files.Files``.

    Args:
        after: called after every operation; what a crash may leave at that moment is ``crash_states()``.
    """

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {0: Inode(directory=True)}
        self.after = lambda: None
        self._next = 1

    # --- operations

    def create(self, path: str) -> _Output:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, "exists", path)
        return _Output(self, self._link(parent, name, Inode(directory=False)))

    def make_directory(self, path: str) -> None:
        parent, name = self._parent(path)
        if name not in parent.entries:
            self._link(parent, name, Inode(directory=True))
            self.after()

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        node = self._find(path)
        if node.directory:
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        return node.data[offset:] if size < 0 else node.data[offset : offset + size]

    def view(self, path: str) -> memoryview:
        return memoryview(bytearray(self.read(path)))

    def size(self, path: str) -> int:
        return len(self._find(path).data)

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(self._find(path).entries)
        except FileNotFoundError:
            return []

    def rename(self, old: str, new: str) -> None:
        (parent, before), (other, after) = self._parent(old), self._parent(new)
        assert parent is other, "only inside one directory"
        number = parent.entries[before]
        if self.inodes[number].directory and after in parent.entries:
            raise FileExistsError(errno.EEXIST, "exists", new)
        parent.pending += [("rename", f"{before}\0{after}", number)]
        del parent.entries[before]
        parent.entries[after] = number
        self.after()

    def sync_directory(self, path: str = "") -> None:
        node = self._find(path)
        node.synced_entries, node.pending = dict(node.entries), []
        self.after()

    def remove(self, path: str) -> None:
        try:
            parent, name = self._parent(path)
            node = self.inodes[parent.entries[name]]
        except (FileNotFoundError, KeyError):
            return
        for child in list(node.entries):
            self.remove(f"{path}/{child}")
        parent.pending.append(("unlink", name, None))
        del parent.entries[name]
        self.after()

    # --- crashes

    def crash_states(self, rng: random.Random) -> Iterator[ForgetfulFiles]:
        """File systems as they may be found after a crash now; all of them where they are few, else a sample."""
        directories = [number for number, node in self.inodes.items() if node.directory and node.pending]
        unsynced = [n for n, node in self.inodes.items() if not node.directory and node.data != node.synced]
        choices = [list(_subsets(len(self.inodes[n].pending), rng)) for n in directories]
        for chosen in itertools.islice(itertools.product(*choices), 200):
            for variant in DATA_VARIANTS if unsynced else ("lost",):
                yield self._after_crash(dict(zip(directories, chosen, strict=True)), dict.fromkeys(unsynced, variant))
            if len(unsynced) > 1:
                mixed = {number: rng.choice(DATA_VARIANTS) for number in unsynced}
                yield self._after_crash(dict(zip(directories, chosen, strict=True)), mixed)

    def _after_crash(self, applied: dict[int, tuple[bool, ...]], data: dict[int, str]) -> ForgetfulFiles:
        found = ForgetfulFiles()
        found._next = self._next
        found.inodes = {number: node.copy() for number, node in self.inodes.items()}
        for number, node in found.inodes.items():
            if node.directory:
                entries = dict(node.synced_entries)
                for happened, change in zip(applied.get(number, ()), node.pending, strict=False):
                    if happened:
                        _apply(entries, change)
                node.entries, node.synced_entries, node.pending = entries, dict(entries), []
            else:
                node.data = node.synced = _survivor(node, data.get(number, "lost"))
        return found

    # --- lookup

    def _find(self, path: str) -> Inode:
        node = self.inodes[0]
        for part in filter(None, path.split("/")):
            if part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "not found", path)
            node = self.inodes[node.entries[part]]
        return node

    def _parent(self, path: str) -> tuple[Inode, str]:
        before, _, name = path.rpartition("/")
        return self._find(before), name

    def _link(self, parent: Inode, name: str, node: Inode) -> int:
        number, self._next = self._next, self._next + 1
        self.inodes[number] = node
        parent.entries[name] = number
        parent.pending.append(("link", name, number))
        return number


class _Output:
    def __init__(self, files: ForgetfulFiles, number: int) -> None:
        self._files, self._number = files, number
        files.after()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files.inodes[self._number].data += bytes(data)
        self._files.after()

    def sync(self) -> None:
        node = self._files.inodes[self._number]
        node.synced = node.data
        self._files.after()

    def close(self) -> None:
        pass


def _apply(entries: dict[str, int], change: Name) -> None:
    what, name, number = change
    if what == "unlink":
        entries.pop(name, None)
    elif what == "link":
        assert number is not None
        entries[name] = number
    else:
        assert number is not None
        before, after = name.split("\0")
        if entries.get(before) == number:
            del entries[before]
        entries[after] = number


def _survivor(node: Inode, variant: str) -> bytes:
    kept, new = node.synced, node.data[len(node.synced) :]
    if variant == "written":
        return kept + new
    if variant == "torn":
        return kept + new[: len(new) // 2]
    return kept + bytes(len(new)) if variant == "zeros" else kept


def _subsets(count: int, rng: random.Random) -> Iterator[tuple[bool, ...]]:
    if count <= _ALL_SUBSETS_UP_TO:
        yield from itertools.product((False, True), repeat=count)
        return
    for reached in range(count + 1):
        yield tuple(index < reached for index in range(count))
    for _ in range(_SAMPLED):
        yield tuple(rng.random() < 0.5 for _ in range(count))
