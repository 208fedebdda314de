"""Which tensors travel together: pure functions from tensors in ready order to fusion groups."""

from thinwire.fusion.fixed import fixed_groups, parse_fusion

__all__ = ["fixed_groups", "parse_fusion"]
