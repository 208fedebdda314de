"""Take a lab apart, also when the process that built it was killed.

Run as a script (`python -I -S reaper.py LAB`), this is the lab's reaper: a small process in a session of its own that
reads from a pipe held by the owner. However the owner ends, the kernel closes that pipe, and the reaper ends what is
left. A parent death signal would not do: it misses grandchildren (torchrun's workers), it fires when the *thread* that
started the child ends, and it leaves the namespaces. Only the standard library, no import of thinwire: it must start in
milliseconds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

NAMESPACE_DIR = Path("/var/run/netns")  # fixed by iproute2
STATE_DIR = Path("/run/thinwire-lab")
DONE = "done"
_GRACE_S = 2.0
_BUILD_CALL_S = 0.5  # an `ip` that was under way when its owner died has ended after this


def namespaces_of(lab: str) -> list[str]:
    """Return the names of the namespaces that belong to this lab and exist now."""
    if not NAMESPACE_DIR.is_dir():
        return []
    return sorted(path.name for path in NAMESPACE_DIR.iterdir() if path.name.startswith(f"{lab}-"))


def hosts_file(lab: str) -> Path:
    """Return where the lab keeps the `/etc/hosts` that its hosts see."""
    return STATE_DIR / f"{lab}.hosts"


def remove_lab(lab: str) -> list[str]:
    """Kill every process in the lab's namespaces, delete these, and return their names. Safe to repeat."""
    names = namespaces_of(lab)
    kill_inside(names)
    if names:
        deletions = "".join(f"netns delete {name}\n" for name in names)
        # -force: another reaper or `lab clean` may have been faster.
        subprocess.run(["ip", "-force", "-batch", "-"], input=deletions, text=True, capture_output=True, check=False)
    hosts_file(lab).unlink(missing_ok=True)
    return names


def kill_inside(namespaces: Iterable[str]) -> None:
    """Kill every process in these namespaces and wait (briefly) until none is left."""
    deadline_s = time.monotonic() + _GRACE_S
    inodes = set(_inodes(namespaces))
    while inodes and (pids := _pids_inside(inodes)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _inodes(namespaces: Iterable[str]) -> Iterator[int]:
    for name in namespaces:
        with contextlib.suppress(OSError):
            yield (NAMESPACE_DIR / name).stat().st_ino


def _pids_inside(inodes: set[int]) -> list[int]:
    """One pass over /proc instead of one `ip netns pids` per namespace."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes:
                    pids.append(int(entry))
    return pids


def end_groups(groups: set[int]) -> None:
    """Ask these process groups to end, then kill what remains of them."""
    signalled = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    deadline_s = time.monotonic() + _GRACE_S
    while any(_signal_group(group, 0) for group in signalled) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    for group in signalled:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(lab: str) -> None:
    """Follow the owner's messages (`start GROUP`, `end GROUP`, `done`); clean up if they stop without `done`."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        verb, _, group = line.partition(" ")
        (groups.add if verb == "start" else groups.discard)(int(group))
    end_groups(groups)
    time.sleep(_BUILD_CALL_S)
    remove_lab(lab)


if __name__ == "__main__":
    main(sys.argv[1])
