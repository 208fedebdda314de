"""DDP as torch has it: stock, and with torch's own compression hooks, which thinwire is compared with."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.demo.settings import Contestant

# Torch's PowerSGD starts its second collective from a completion callback: with several buckets ranks start them in
# different orders, and on gloo the job dies of a size mismatch. So one bucket must hold the whole model.
ONE_BUCKET_MB = 4096
POWERSGD_DENSE_STEPS = 2  # the fewest that torch allows with error feedback and warm start


def wrap_in_ddp(model: nn.Module, contestant: Contestant) -> DistributedDataParallel:
    """The model in DDP over all ranks, with the hook that the contestant's mode asks for."""
    if contestant.mode == "ddp_powersgd":
        module = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = PowerSGDState(
            process_group=dist.group.WORLD,
            matrix_approximation_rank=contestant.powersgd_rank,
            start_powerSGD_iter=POWERSGD_DENSE_STEPS,
        )
        module.register_comm_hook(state, powerSGD_hook)
        return module
    module = DistributedDataParallel(model)
    if contestant.mode == "ddp_fp16":
        module.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return module
