"""Can this machine build a lab, and if not, what is missing?"""

import functools
import os
import shutil
import subprocess
import sys

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount"}
_OTHERWISE = "or use the emulated lab (`thinwire lab run --emulate`, EmulatedLab in Python)"
# All that a lab needs of the kernel, in an anonymous namespace that is gone when `sh` ends.
_TRIAL = (
    "ip link add trial type bridge && ip link add trial0 type veth peer name trial1 && "
    "tc qdisc add dev trial0 root tbf rate 1mbit burst 32kb latency 100ms"
)


@functools.cache
def lab_available() -> tuple[bool, str]:
    """Return whether network namespaces with shaped links work here, and why not (empty if they do)."""
    reason = _what_is_missing()
    return not reason, reason


def _what_is_missing() -> str:
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux network namespaces, this is {sys.platform}: run it on Linux, {_OTHERWISE}"
    if os.geteuid() != 0:
        return f"the lab needs root to create network namespaces: run it as root (sudo), {_OTHERWISE}"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return (
                f"the lab needs the command `{tool}`, which was not found: install the package {package}, {_OTHERWISE}"
            )
    trial = ["unshare", "--net", "--mount", "--uts", "sh", "-c", _TRIAL]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (
            f"this machine does not allow network namespaces with shaped links ({done.stderr.strip()}): "
            f"in a container, start it with --privileged; on a bare kernel, load veth, bridge and sch_tbf; {_OTHERWISE}"
        )
    return ""
