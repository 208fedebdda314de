"""Pure torch: what a compressor is, what it may ask for, and how its messages look. Never torch.distributed."""

from thinwire.core import memory
from thinwire.core.compressor import (
    ELEMENTWISE,
    RESIDUAL,
    Codec,
    Compressor,
    Exchange,
    Exchanged,
    Layout,
    Role,
    State,
    Step,
    Wrapper,
    residual_key,
)
from thinwire.core.errors import (
    CheckpointError,
    ConfigError,
    DesyncError,
    PayloadError,
    ThinwireError,
    TransportError,
)
from thinwire.core.payload import Payload
from thinwire.core.registry import Listing, available, make, register
from thinwire.core.request import AllGather, AllReduce, AllToAll, Broadcast, Reply, Request
from thinwire.core.schedule import Schedule
from thinwire.core.spec import TensorSpec, UnitSpec

__all__ = [
    "ELEMENTWISE",
    "RESIDUAL",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "CheckpointError",
    "Codec",
    "Compressor",
    "ConfigError",
    "DesyncError",
    "Exchange",
    "Exchanged",
    "Layout",
    "Listing",
    "Payload",
    "PayloadError",
    "Reply",
    "Request",
    "Role",
    "Schedule",
    "State",
    "Step",
    "TensorSpec",
    "ThinwireError",
    "TransportError",
    "UnitSpec",
    "Wrapper",
    "available",
    "make",
    "memory",
    "register",
    "residual_key",
]
