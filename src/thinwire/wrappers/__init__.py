"""What stands before a compressor: feedback, momentum, routing, layer selection, densities. Importing registers all."""

from thinwire.wrappers import hierarchical, host, routing  # noqa: F401  (registers them)
from thinwire.wrappers.accordion import Accordion
from thinwire.wrappers.error_feedback import ErrorFeedback, NoFeedback, with_feedback
from thinwire.wrappers.hypernet import HyperNet
from thinwire.wrappers.lgreco import LGreCo
from thinwire.wrappers.momentum import MomentumCorrection
from thinwire.wrappers.normgreedy import NormGreedy
from thinwire.wrappers.roundrobin import RoundRobin

__all__ = [
    "Accordion",
    "ErrorFeedback",
    "HyperNet",
    "LGreCo",
    "MomentumCorrection",
    "NoFeedback",
    "NormGreedy",
    "RoundRobin",
    "with_feedback",
]
