"""Cases: models that are averaged over some of the ranks only. Four ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gloo.support import Cases, Net, Rank, close, digest, loss_of, mean_gradients, seeded, sgd, train

CASES = Cases()


@CASES.both
def two_pairs_train_apart(rank: Rank, engine: str) -> str:
    """Ranks 0, 1 and ranks 2, 3 have models of their own; the pairs neither mix nor wait for each other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = pairs[rank.index // 2]
    net = seeded(Net)
    model = DistributedDataParallel(net, process_group=own) if engine == "ddp" else net
    settings = {} if engine == "ddp" else {"process_group": own}
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer, compress="dense", **settings) as wire:
        assert "2 ranks" in wire.explain()
        loss_of(model, rank.index % 2, 0).backward()
        for (name, gradient), parameter in zip(
            mean_gradients(seeded(Net), 2, 0).items(), net.parameters(), strict=True
        ):
            assert parameter.grad is not None, name
            close(parameter.grad, gradient)
        steps = 3 + rank.index // 2  # the pairs take different numbers of steps
        train(model, optimizer, rank.index, range(1, steps))
        assert wire.stats().steps == steps
    sums = torch.tensor([float(sum(p.detach().sum() for p in net.parameters()))], dtype=torch.float64)
    gathered = [torch.zeros_like(sums) for _ in range(2)]
    dist.all_gather(gathered, sums, group=own)
    assert torch.equal(*gathered)
    return digest({"same for all": torch.zeros(1)})
