"""Mixed precision: scales per layer, which keep gradients out of fp16's dead zone."""

from thinwire.amp.distributed import layer_scaler
from thinwire.amp.layer_scaler import LayerScaler

__all__ = ["LayerScaler", "layer_scaler"]
