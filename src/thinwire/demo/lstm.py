"""An LSTM over bytes: few, large tensors, all of whose gradients are ready only at the end of backward.

Nothing of a dense exchange hides behind such a backward, the opposite of a GPT, whose layers are ready one by one.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.demo.cnn import VOCABULARY


class ByteLSTM(nn.Module):
    """Bytes in, the mean cross-entropy (nats per byte) of predicting the next byte out; 3.9 M parameters."""

    def __init__(self, layers: int = 2, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both [batch, time], int64
        states, _ = self.lstm(self.token(inputs))  # [batch, time, hidden]
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())
