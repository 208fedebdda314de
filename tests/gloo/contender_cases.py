"""Cases of the benchmarks' contenders: DDP with torch's own hooks trains the demo's models."""

from __future__ import annotations

import torch
from benchmarks.step.interleaved import WARMUP_STEPS, warmup_steps

from gloo.support import Cases, Rank, digest
from thinwire.demo.contender import Contender, make_contender
from thinwire.demo.data import Corpus
from thinwire.demo.ddp_hooks import POWERSGD_DENSE_STEPS
from thinwire.demo.settings import Contestant, Mode, Workload
from thinwire.demo.train import train_step

CASES = Cases()
CORPUS = Corpus(*(torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8),) * 2)
WORKLOAD = Workload(model="tiny", batch=1, seq=32)


def trained(mode: Mode, model: str = "tiny", steps: int = 1) -> tuple[Contender, str]:
    workload = Workload(model=model, batch=1, seq=32)
    with make_contender(Contestant(name=mode, label=mode, mode=mode, workload=workload), 30.0) as contender:
        for step in range(steps):
            train_step(contender, CORPUS, workload, step)
        return contender, digest(dict(contender.model.named_parameters()))


def gradients(contender: Contender) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in contender.model.parameters() if p.grad is not None])


def rank_of_gradient(contender: Contender) -> int:
    gradient = dict(contender.model.named_parameters())["blocks.0.up.weight"].grad
    assert gradient is not None
    return int(torch.linalg.matrix_rank(gradient, rtol=1e-4))


@CASES.ddp
def fp16_hook_rounds_what_stock_ddp_sends(rank: Rank, engine: str) -> str:
    (stock, _), (hooked, state) = trained("ddp"), trained("ddp_fp16")
    expected, got = gradients(stock), gradients(hooked)
    assert not torch.equal(got, expected)
    assert float((got - expected).norm() / expected.norm()) < 1e-2
    return state


@CASES.ddp
def powersgd_hook_compresses_in_one_bucket_after_its_dense_steps(rank: Rank, engine: str) -> str:
    steps = POWERSGD_DENSE_STEPS + 2
    contestant = Contestant(name="p", label="p", mode="ddp_powersgd", workload=WORKLOAD)
    assert warmup_steps(contestant) == WARMUP_STEPS + POWERSGD_DENSE_STEPS
    (stock, _), (hooked, state) = trained("ddp", steps=steps), trained("ddp_powersgd", steps=steps)
    assert rank_of_gradient(hooked) <= contestant.powersgd_rank < rank_of_gradient(stock)
    return state


@CASES.ddp
def powersgd_hook_is_dense_at_first(rank: Rank, engine: str) -> str:
    (stock, _), (hooked, state) = trained("ddp"), trained("ddp_powersgd")
    torch.testing.assert_close(gradients(hooked), gradients(stock))
    return state


@CASES.ddp
def the_lstm_gets_the_same_mean_from_thinwire_and_ddp(rank: Rank, engine: str) -> str:
    (stock, _), (attached, state) = trained("ddp", model="lstm"), trained("thinwire", model="lstm")
    assert 3e6 < sum(p.numel() for p in stock.model.parameters()) < 4e6
    torch.testing.assert_close(gradients(attached), gradients(stock))  # auto begins dense
    return state
