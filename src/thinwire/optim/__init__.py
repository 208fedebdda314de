"""Optimizers that know how old what they receive is; drop-in replacements of torch's. See ``docs/optimizers.md``."""

from thinwire.engine.ages import Received, Wire, wire_of
from thinwire.optim.adamw import AdamW
from thinwire.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Received", "Wire", "wire_of"]
