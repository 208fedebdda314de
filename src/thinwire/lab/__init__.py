"""A cluster on one machine: hosts in network namespaces, joined by links of a chosen rate.

`Lab` is the real thing (root and iproute2 needed), `EmulatedLab` its twin without namespaces.
Nothing here imports torch.
"""

from thinwire.lab.available import lab_available
from thinwire.lab.base import BaseLab
from thinwire.lab.clean import clean_leftovers
from thinwire.lab.cluster import Lab
from thinwire.lab.emulated import EmulatedLab
from thinwire.lab.errors import LabError
from thinwire.lab.rates import format_rate, parse_rate
from thinwire.lab.running import LabResult, Running, Traffic

__all__ = [
    "BaseLab",
    "EmulatedLab",
    "Lab",
    "LabError",
    "LabResult",
    "Running",
    "Traffic",
    "clean_leftovers",
    "format_rate",
    "lab_available",
    "parse_rate",
]
