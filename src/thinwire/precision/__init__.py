"""How values look on the wire, and how gradients keep out of fp16's dead zone on the way there."""

from thinwire.precision import positions
from thinwire.precision.formats import FORMATS, WireFormat, wire_format
from thinwire.precision.layer_scaler import LayerScaler
from thinwire.precision.types import Encoded
from thinwire.precision.wire_scale import with_amax

__all__ = ["FORMATS", "Encoded", "LayerScaler", "WireFormat", "positions", "wire_format", "with_amax"]
