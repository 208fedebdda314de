"""A compressor of your own, in the script that uses it: keep one entry of each block, the largest.

torchrun --nproc-per-node 2 examples/own_compressor.py
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.core import Codec, ConfigError, Payload, Step, UnitSpec, register


@register("blockmax")
@dataclass(frozen=True, kw_only=True)
class BlockMax(Codec):
    """Send the largest magnitude of every block of ``block`` values, with its place; the rest waits in the residual.

    Args:
        block: longer blocks send less.
    """

    feedback = True  # wrapped in error feedback unless the spec says noef
    block: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 256:
            raise ConfigError(f"blockmax: block is {self.block}; expected 1 to 256")

    @property
    def sparse(self) -> bool:
        return True

    def encode(self, x: Tensor, step: Step) -> Payload:
        rows = nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        places = rows.abs().argmax(dim=1)
        return Payload(values=rows.gather(1, places[:, None]).flatten(), places=places.to(torch.uint8))

    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor:
        rows = payload["values"].new_zeros(len(payload["values"]), self.block)
        rows.scatter_(1, payload["places"].long()[:, None], payload["values"][:, None])
        return rows.flatten()[: unit.numel]

    def payload_bytes(self, unit: UnitSpec) -> int:
        blocks = -(-unit.numel // self.block)
        return Payload.size({"values": (torch.float32, blocks), "places": (torch.uint8, blocks)})

    @classmethod
    def examples(cls) -> Sequence["BlockMax"]:
        return [cls(), cls(block=64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = thinwire.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # knows the age of sparse updates
    data = torch.Generator().manual_seed(dist.get_rank())
    with thinwire.attach(model, optimizer, compress="blockmax(block=32)") as wire:
        if dist.get_rank() == 0:
            print(wire.explain())
        for _ in range(options.steps):
            x = torch.randn(64, 128, generator=data)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f}, {wire.stats().reduction_factor:.1f} times fewer bytes than dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
