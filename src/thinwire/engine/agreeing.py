"""Small agreements between steps: what rank 0 has decided, or what everybody has measured."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from thinwire.core import AllGather, AllReduce
from thinwire.engine.session import Session


def gathered(session: Session, mine: Any) -> list[Any]:
    """Everybody's value, by rank. All ranks call it at the same point."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(session.device)
    return [json.loads(bytes(one.cpu().tolist())) for one in session.ask(AllGather(text, varying=True))]


def agreed(session: Session, mine: Any) -> Any:
    """Rank 0's value; what the others give is not looked at."""
    return gathered(session, mine if session.rank == 0 else None)[0]


def latest(session: Session, mine: Tensor) -> Tensor:
    """Element by element the largest of all ranks. All call it at the same point."""
    largest: Tensor = session.ask(AllReduce(mine.to(session.device), "max"))
    return largest.cpu()
