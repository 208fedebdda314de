"""How values and positions are written on the wire."""

from thinwire.formats import positions
from thinwire.formats.catalog import FORMATS, WireFormat, wire_format
from thinwire.formats.types import Encoded
from thinwire.formats.wire_scale import with_amax

__all__ = ["FORMATS", "Encoded", "WireFormat", "positions", "wire_format", "with_amax"]
