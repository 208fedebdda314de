"""Wrappers that keep what was not sent. The only places where a residual is stored."""

from thinwire.feedback.error_feedback import ErrorFeedback, NoFeedback, with_feedback
from thinwire.feedback.momentum import MomentumCorrection

__all__ = ["ErrorFeedback", "MomentumCorrection", "NoFeedback", "with_feedback"]
