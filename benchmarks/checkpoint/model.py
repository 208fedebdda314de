"""The work that all contestants do: a GPT of 24 million parameters with AdamW, on CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, VOCABULARY, CONTEXT = 448, 7, 7, 8192, 64


class Gpt(nn.Module):
    """Pre-norm transformer with tied embeddings off: 24 M parameters, 291 MB with Adam's moments."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.blocks(self.tokens(x), mask=mask, is_causal=True))
        return out


def make(seed: int = 0) -> tuple[Gpt, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(seed)
    model = Gpt()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: Gpt, optimizer: torch.optim.Optimizer, step: int, sequences: int) -> None:
    """Forward, backward, step, on random tokens."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCABULARY, (sequences, CONTEXT + 1), generator=generator)
    optimizer.zero_grad()
    logits = model(x[:, :-1])
    nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), x[:, 1:].reshape(-1)).backward()
    optimizer.step()


def parameters(model: nn.Module) -> int:
    """How many."""
    return sum(p.numel() for p in model.parameters())
