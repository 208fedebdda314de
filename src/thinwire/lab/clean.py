"""Remove what labs left behind when even their reaper was killed."""

import os
import re
from pathlib import Path

from thinwire.lab.errors import LabError
from thinwire.lab.reaper import NAMESPACE_DIR, STATE_DIR, remove_lab

_LAB = re.compile(r"(?P<lab>tw(?P<owner>\d+)-\d+)(?:-(?:h\d+|sw)|\.hosts)")


def clean_leftovers(*, all: bool = False) -> list[str]:
    """Remove the namespaces of labs whose owner is dead and return their names.

    Args:
        all: also of labs that are in use, with every process in them.
    """
    removable = sorted(lab for lab, owner in _existing_labs().items() if all or not _is_alive(owner))
    if removable and os.geteuid() != 0:
        raise LabError(f"removing {', '.join(removable)} needs root: run `thinwire lab clean` as root (sudo)")
    return [namespace for lab in removable for namespace in remove_lab(lab)]


def _existing_labs() -> dict[str, int]:
    """Map each lab that has a namespace or a file to the process that owns it."""
    paths = [path for folder in (NAMESPACE_DIR, STATE_DIR) if folder.is_dir() for path in folder.iterdir()]
    matches = filter(None, (_LAB.fullmatch(path.name) for path in paths))
    return {match["lab"]: int(match["owner"]) for match in matches}


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
