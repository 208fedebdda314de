"""When workers synchronise: policies, one file each."""

from thinwire.sync.policy import Policy, parse_policy, policies

__all__ = ["Policy", "parse_policy", "policies"]
