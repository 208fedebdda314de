"""Who answers an exchange: links over real process groups, a simulator, and wrappers around either."""

from thinwire.comm.framing import Framed
from thinwire.comm.link import Job, Link, Rounds
from thinwire.comm.simulate import simulate
from thinwire.comm.torch_dist import GLOO_LANES, TorchDistTransport
from thinwire.comm.trace import Span, Trace, write_chrome_trace
from thinwire.comm.transport import Pending, Tag, Transport, fit_lanes
from thinwire.comm.wrappers import Delayed, Faulty, Throttled

__all__ = [
    "GLOO_LANES",
    "Delayed",
    "Faulty",
    "Framed",
    "Job",
    "Link",
    "Pending",
    "Rounds",
    "Span",
    "Tag",
    "Throttled",
    "TorchDistTransport",
    "Trace",
    "Transport",
    "fit_lanes",
    "simulate",
    "write_chrome_trace",
]
