"""How values look on the wire."""

from thinwire.precision import positions
from thinwire.precision.formats import FORMATS, Encoded, WireFormat, wire_format

__all__ = ["FORMATS", "Encoded", "WireFormat", "positions", "wire_format"]
