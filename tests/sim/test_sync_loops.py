"""What a training loop may do under a policy with local steps: skip, accumulate, schedule, evaluate, count unequally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from sim.sync_world import Worker, loss_of, model_of, on_ranks, worker
from sim.threads import ThreadedWorld, run_ranks
from thinwire.sync import parse_policy


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_ranks_count_by_the_steps_they_have_taken() -> None:
    """Rank 1 takes one of two steps: its delta counts half."""

    def work(one: Worker) -> Any:
        start = copies(one.model)
        one.train(1)
        if one.rank == 0:
            generator_step = one.step
            one.optimizer.zero_grad()
            loss_of(one.model, 0, generator_step).backward()
            moved = {n: p.detach() - 0.1 * p.grad for n, p in one.model.named_parameters() if p.grad is not None}
            one.optimizer.step()
        else:
            moved = copies(one.model)
            one.wire.idle_step()
        return {name: moved[name] - start[name] for name in start}, start, copies(one.model)

    (first, start, after), (second, _, _) = on_ranks(work, "local(h=2)", optimizer=torch.optim.SGD, lr=0.1)
    for name, value in after.items():
        expected = start[name] + (first[name] + second[name] / 2) / 1.5
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    plain = {name: start[name] + (first[name] + second[name]) / 2 for name in start}
    assert not torch.allclose(after["last.weight"], plain["last.weight"], rtol=1e-3, atol=1e-5)


def test_a_nan_gradient_skips_the_step_of_that_rank_alone() -> None:
    def work(one: Worker) -> Any:
        one.train(3)
        before = copies(one.model)
        moments = one.optimizer.state[next(one.model.parameters())]["exp_avg"].clone()
        one.optimizer.zero_grad()
        (loss_of(one.model, one.rank, 3) * (float("nan") if one.rank == 1 else 1.0)).backward()
        one.optimizer.step()
        same_moments = torch.equal(moments, one.optimizer.state[next(one.model.parameters())]["exp_avg"])
        moved = [n for n, value in copies(one.model).items() if not torch.equal(value, before[n])]
        one.step = 4
        one.train(8)
        return moved, same_moments, one.wire.state_dict()["sync"], one.losses

    (moved, kept, mine, losses), (others, others_kept, theirs, _) = on_ranks(work, "local(h=20)")
    assert moved
    assert not others, "a step with NaN gradients moved weights"
    assert (kept, others_kept) == (False, True)
    assert (mine["taken"], theirs["taken"], mine["step"], theirs["step"]) == (12, 11, 12, 12)
    assert losses[-1] < losses[0]


def test_weights_that_are_not_finite_are_averaged_by_nobody() -> None:
    """One rank has diverged: the average is dropped on all ranks, and nothing of it stays in a residual."""

    def work(one: Worker) -> Any:
        one.train(4)
        before = one.wire.state_dict()["sync"]["deltas"]
        if one.rank == 1:
            with torch.no_grad():
                one.model.get_parameter("first.weight")[0, 0] = float("inf")
        one.wire.idle_step()
        one.wire.idle_step()
        after = one.wire.state_dict()["sync"]["deltas"]
        assert all(torch.equal(before["anchor"][n], v) for n, v in after["anchor"].items())
        for name, state in after["channel"]["tensors"].items():
            assert all(torch.equal(before["channel"]["tensors"][name][k], v) for k, v in state.items()), name
        return one.wire.stats().skipped_steps

    assert on_ranks(work, "local(h=2, compress='int4')") == [1, 1]


class Skipping:
    """As GradScaler: the optimizer never steps where its own rank has overflowed."""

    def __init__(self, overflows: set[int]) -> None:
        self.overflows, self.calls = overflows, 0

    def get_scale(self) -> float:
        return 1.0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls += 1
        if self.calls not in self.overflows:
            optimizer.step()


def test_a_scaler_that_skips_on_one_rank_keeps_ranks_in_step() -> None:
    world, scalers = ThreadedWorld(2, lanes=2), [Skipping(set()), Skipping({2, 5})]

    def run(rank: int) -> Any:
        scaler = scalers[rank]
        with worker(world, rank, "stream(bits=4)", scaler=scaler) as one:
            for step in range(8):
                one.optimizer.zero_grad()
                loss_of(one.model, rank, step).backward()
                scaler.step(one.optimizer)
            state = one.wire.state_dict()["sync"]
        assert "step" not in vars(scaler), "detach gives the scaler back as it was"
        return state

    first, second = run_ranks(run, 2)
    assert (first["step"], second["step"]) == (8, 8)
    assert (first["taken"], second["taken"]) == (8, 6)


class Noting(torch.optim.SGD):
    """Writes down the rate with which it steps."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.noted = [*getattr(self, "noted", []), *(group["lr"] for group in self.param_groups)]
        return super().step(closure)


def test_the_learning_rate_is_scaled_for_the_step_alone() -> None:
    def work(one: Worker) -> Any:
        scheduler = torch.optim.lr_scheduler.LambdaLR(one.optimizer, lambda step: 0.5**step)
        seen = []
        for _ in range(4):
            one.train(1)
            seen.append(one.optimizer.param_groups[0]["lr"])
            scheduler.step()
        assert "learning rate × 3" in one.wire.explain()
        return one.optimizer.noted, seen  # type: ignore[attr-defined]

    for during, after in on_ranks(work, "stream(bits=4, lr_scale=3.0)", optimizer=Noting, lr=0.08):
        assert during == pytest.approx([0.24, 0.12, 0.06, 0.03])
        assert after == pytest.approx([0.08, 0.04, 0.02, 0.01])


@pytest.mark.parametrize(
    ("optimizer", "spec", "world_size", "factor"),
    [
        (torch.optim.AdamW, "stream(bits=4)", 3, 3**0.5),
        (torch.optim.AdamW, "stream(bits=4)", 5, 2.0),
        (torch.optim.AdamW, "stream(bits=4, slices=12)", 3, 1.0),
        (torch.optim.AdamW, "stream(bits=4, lr_scale=1.0)", 3, 1.0),
        (torch.optim.SGD, "stream(bits=4)", 3, 1.0),
    ],
)
def test_the_rule_of_the_learning_rate(optimizer: Any, spec: str, world_size: int, factor: float) -> None:
    for lines in on_ranks(lambda one: one.wire.explain(), spec, world_size, optimizer=optimizer):
        assert (f"learning rate × {factor:g}" in lines) == (factor != 1.0)


def test_averaged_puts_agreed_weights_in_place_and_gives_back_the_own() -> None:
    def work(one: Worker) -> Any:
        one.train(5)
        own = copies(one.model)
        with one.wire.averaged():
            anchor = copies(one.model)
        with one.wire.averaged(exact=True):
            mean = copies(one.model)
            with pytest.raises(thinwire.ConfigError, match=r"inside wire\.averaged"):
                one.optimizer.step()
        for name, value in copies(one.model).items():
            assert torch.equal(value, own[name]) or one.model.get_parameter(name).grad is not None
        return own, anchor, mean

    (first, anchor, mean), (second, others_anchor, others_mean) = on_ranks(work, "stream(bits=4)")
    for name, value in first.items():
        assert torch.equal(anchor[name], others_anchor[name])
        assert torch.equal(mean[name], others_mean[name])
        torch.testing.assert_close(mean[name], (value + second[name]) / 2)
        assert not torch.equal(value, second[name])


def test_an_error_inside_averaged_gives_back_the_own_weights() -> None:
    def work(one: Worker) -> None:
        one.train(5)
        own = copies(one.model)
        with pytest.raises(KeyError), one.wire.averaged():
            raise KeyError(str(own.keys() - copies(one.model).keys()))
        assert all(torch.equal(value, own[name]) for name, value in copies(one.model).items())
        one.train(2)

    on_ranks(work, "stream(bits=4)")


def test_running_statistics_are_averaged_with_the_weights() -> None:
    def work(one: Worker) -> Any:
        one.train(3)
        kept = [one.model.get_buffer(f"norm.{name}").clone() for name in ("running_mean", "running_var")]
        one.wire.idle_step()
        return kept, [one.model.get_buffer(f"norm.{name}").clone() for name in ("running_mean", "running_var")]

    (first, after), (second, others_after) = on_ranks(work, "diloco(h=4)")
    for mine, theirs, agreed, others in zip(first, second, after, others_after, strict=True):
        assert not torch.equal(mine, theirs)
        assert torch.equal(agreed, others)
        torch.testing.assert_close(agreed, (mine + theirs) / 2)


def test_several_optimizers_make_one_step() -> None:
    world = ThreadedWorld(2, lanes=2)

    def run(rank: int) -> Any:
        model = model_of()
        first, *rest = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=0.01)]
        with thinwire.attach(model, optimizers, sync="local(h=2)", transport=world.transport(rank)) as wire:
            for step in range(6):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
            return wire.stats().steps, wire.state_dict()["sync"]["step"], copies(model)

    (steps, counted, mine), (_, _, theirs) = run_ranks(run, 2)
    assert (steps, counted) == (3, 6)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_gradients_accumulate_and_are_clipped_locally() -> None:
    def work(one: Worker) -> Any:
        for step in range(6):
            one.optimizer.zero_grad()
            for micro in range(2):
                loss_of(one.model, one.rank, 2 * step + micro).backward()
            norm = nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
            one.optimizer.step()
        return float(norm), one.wire.stats().steps

    (first, steps), (second, _) = on_ranks(work, "local(h=3)")
    assert first != second, "gradients were averaged"
    assert steps == 2


def test_weights_that_differ_at_the_first_step_are_found() -> None:
    """Replicas loaded from another run without its wire state: anchors would differ for ever."""

    def work(one: Worker) -> None:
        with torch.no_grad():
            one.model.get_parameter("last.bias").add_(one.rank)
        one.train(3)

    with pytest.raises(thinwire.DesyncError, match="anchor"):
        on_ranks(work, "local(h=2)")


def test_weights_loaded_after_attach_are_the_anchor() -> None:
    def work(one: Worker) -> Any:
        loaded = model_of(seed=7)
        one.model.load_state_dict(loaded.state_dict())
        one.train(1)
        with one.wire.averaged():
            return all(torch.equal(v, dict(loaded.named_parameters())[n]) for n, v in copies(one.model).items())

    assert on_ranks(work, "stream(bits=4)") == [True, True]


def test_post_local_averages_gradients_first() -> None:
    def work(one: Worker) -> Any:
        sums = []
        for _ in range(5):
            one.train(1)
            sums.append(float(sum(value.double().sum() for value in copies(one.model).values())))
        return sums

    first, second = on_ranks(work, "post_local(start=3, h=10)")
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, True, False, False]


def test_layouts_and_types_of_weights() -> None:
    """channels_last convolutions are cut in memory order; bf16 and fp64 weights have anchors of their own precision."""
    world = ThreadedWorld(2, lanes=2)

    def run(rank: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        conv = nn.Conv2d(4, 32, 3).to(memory_format=torch.channels_last)
        model = nn.ModuleDict({"conv": conv, "short": nn.Linear(40, 40).bfloat16(), "wide": nn.Linear(8, 8).double()})
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with thinwire.attach(model, optimizer, sync="local(h=2)", transport=world.transport(rank)) as wire:
            for step in range(4):
                optimizer.zero_grad()
                noise = torch.Generator().manual_seed(10 * step + rank)
                sum(
                    (p * torch.randn(p.shape, generator=noise).to(p.dtype)).sum() for p in model.parameters()
                ).backward()  # type: ignore[union-attr]
                optimizer.step()
            anchor = wire.state_dict()["sync"]["deltas"]["anchor"]
            return copies(model), {name: value.dtype for name, value in anchor.items()}

    (mine, dtypes), (theirs, _) = run_ranks(run, 2)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert (dtypes["short.weight"], dtypes["wide.weight"]) == (torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"sync": "stream(bits=3)"}, "bits is 3"),
        ({"sync": "stream(slices=2, delay=3)"}, "from 1 to slices"),
        ({"sync": "local(h=0)"}, "h is 0"),
        ({"sync": "local(k=3)"}, "unexpected keyword"),
        ({"sync": "diloco(momentum=1.5)"}, "momentum is 1.5"),
        ({"sync": "local(h=4)", "compress": "int4"}, "inside sync="),
        ({"sync": "local(h=4)", "optimizer": None}, "give it to attach"),
        ({"sync": "adacomm(h=1)"}, "report_loss"),
    ],
)
def test_mistakes_are_explained(arguments: dict[str, Any], answer: str) -> None:
    def run(rank: int) -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"optimizer": optimizer, **arguments}
        with thinwire.attach(model, transport=world.transport(rank), **given):
            loss_of(model, rank, 0).backward()
            optimizer.step()

    world = ThreadedWorld(2, lanes=2)
    with pytest.raises(thinwire.ConfigError, match=answer):
        run_ranks(run, 2)


def test_a_policy_is_written_as_it_is_read() -> None:
    for text in ("stream(bits=4, slices=3)", "local(h=4)", "streaming_diloco(fragments=2)", "momentum_k(theta=0.5)"):
        assert parse_policy(str(parse_policy(text))) == parse_policy(text)


def test_a_rank_that_dies_ends_the_wait_of_the_others() -> None:
    """Also one that dies between the begin and the end of a flight."""
    world = ThreadedWorld(2, lanes=2)

    def run(rank: int) -> str:
        with worker(world, rank, "stream(bits=4)") as one:
            one.train(3)
            if rank == 1:
                world.hang_up()
                return "gone"
            with pytest.raises(thinwire.TransportError):
                one.train(3)
            return "told"

    assert run_ranks(run, 2) == ["told", "gone"]


def test_ranks_that_take_different_numbers_of_steps_are_told() -> None:
    """A rank that passes over steps without ``idle_step`` would be averaged with other slices than its own."""

    def work(one: Worker) -> None:
        one.train(2 + one.rank)
        if one.rank == 0:
            with one.wire.averaged(exact=True):
                pass
        one.train(3)

    with pytest.raises((thinwire.DesyncError, thinwire.TransportError)):
        on_ranks(work, "stream(bits=4)")
