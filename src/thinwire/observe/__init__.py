"""What a wire tells: reports of steps, observers, metrics, event files, and the report made of them."""

from thinwire.observe.events import EventError, EventWriter, read_events
from thinwire.observe.metrics import WireStats
from thinwire.observe.observer import Observer
from thinwire.observe.report import StepReport

__all__ = ["EventError", "EventWriter", "Observer", "StepReport", "WireStats", "read_events"]
