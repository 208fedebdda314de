"""Drop-in optimizers that correct for the age of each update. See ``docs/explanation/optimizers.md``."""

from thinwire.engine.ages import Received, Wire, wire_of
from thinwire.optim.adamw import AdamW
from thinwire.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Received", "Wire", "wire_of"]
