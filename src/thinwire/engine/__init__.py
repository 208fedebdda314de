"""Adapters between modules and the exchange of their gradients."""
