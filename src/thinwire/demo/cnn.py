"""A deep, narrow residual CNN over bytes: many small tensors, the opposite of a GPT for fusion and compression.

A window of bytes is read as an image of 32 bytes per row; the target is the byte after the window. As a model of source
code it is poor; as a workload it has the layers, sizes and batch norms of a ResNet for small images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
ROW = 32


class Residual(nn.Module):
    """Two convolutions around a shortcut; ``stride`` 2 halves the image."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        plain = channels_in == channels and stride == 1
        self.shortcut = nn.Identity() if plain else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ByteCNN(nn.Module):
    """A stem, three stages of residual blocks, a head: ``6 * blocks + 2`` layers on the main path."""

    def __init__(self, blocks: int = 10, width: int = 16) -> None:
        super().__init__()
        stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for channels_in, channels, stride in stages:
            layers.append(Residual(channels_in, channels, stride))
            layers += [Residual(channels, channels, 1) for _ in range(blocks - 1)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # both [batch, time], int64
        image = inputs.to(torch.float32).view(inputs.shape[0], 1, -1, ROW) / VOCABULARY - 0.5
        features = self.layers(image).mean(dim=(2, 3))
        return F.cross_entropy(self.head(features), targets[:, -1])
