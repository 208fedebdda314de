"""Tensors become means here, and nowhere else: channels, transactions, and who takes part in them."""

from thinwire.exchange.channel import Channel
from thinwire.exchange.membership import Fixed, Membership
from thinwire.exchange.transaction import Outcome, Transaction

__all__ = ["Channel", "Fixed", "Membership", "Outcome", "Transaction"]
