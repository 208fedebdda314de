"""Settings that all tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# Helpers beside the tests are imported as `contract.laws` or `gloo.launch`, whatever the import mode of pytest;
# benchmarks are not installed, and only `python -m pytest` in the root would find them.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# The tensors here are tiny: a second thread per operation only takes the core from another process.
torch.set_num_threads(1)

# Deadlines are absolute times, which a shared machine does not keep; the same examples are tried in every run.
settings.register_profile("thinwire", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("thinwire")


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, with a store in a file: no port, nothing for others to connect to."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
