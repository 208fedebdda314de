"""Who answers an exchange: real process groups, a simulator, wrappers around either, and the scheduler."""

from thinwire.comm.framing import Framed
from thinwire.comm.job import Ticket
from thinwire.comm.scheduler import Scheduler
from thinwire.comm.simulate import simulate
from thinwire.comm.torch_dist import GLOO_LANES, TorchDistTransport
from thinwire.comm.transport import Pending, Tag, Transport, fit_lanes
from thinwire.comm.wrappers import Counting, Delayed, Faulty, Throttled

__all__ = [
    "GLOO_LANES",
    "Counting",
    "Delayed",
    "Faulty",
    "Framed",
    "Pending",
    "Scheduler",
    "Tag",
    "Throttled",
    "Ticket",
    "TorchDistTransport",
    "Transport",
    "fit_lanes",
    "simulate",
]
