"""What runs leave behind and what is made of it: step reports, observers, events, summaries, TensorBoard, HTML pages."""

from thinwire.observe.events import EventError, EventWriter, read_events
from thinwire.observe.metrics import WireStats
from thinwire.observe.observer import Observer
from thinwire.observe.report import StepReport

__all__ = ["EventError", "EventWriter", "Observer", "StepReport", "WireStats", "read_events"]
