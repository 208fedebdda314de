"""What the wire says has arrived: ages, the registry, and saving them."""

from __future__ import annotations

import gc

import pytest
import torch

from thinwire.core import CheckpointError
from thinwire.engine.ages import reads_ages, wire_of
from thinwire.optim import SGD, AdamW
from unit.optim_support import ages_of, parameters, receive


def test_only_what_travels_sparse_has_ages() -> None:
    given = parameters()
    wire = ages_of(given)
    assert set(wire.names) == {"p0", "p2"}
    assert wire.received(given[1]) is None
    assert ages_of(given, "int4").names == set()


def test_mask_indices_and_ages_say_the_same() -> None:
    given = parameters()
    wire = ages_of(given)
    receive(given, 0, ages=wire)
    received, grad = wire.received(given[0]), given[0].grad
    assert received is not None
    assert grad is not None
    assert received.ages.shape == given[0].shape
    assert torch.equal(received.mask, grad != 0)
    assert torch.equal(received.indices, grad.flatten().nonzero().squeeze(1))
    assert received.ages[received.mask].unique().tolist() == [1]


def test_ages_are_the_steps_since_the_last_receipt() -> None:
    given = parameters()
    wire = ages_of(given)
    last = torch.zeros(given[0].shape, dtype=torch.long)
    for step in range(1, 40):
        receive(given, step, ages=wire)
        received = wire.received(given[0])
        assert received is not None
        came = received.mask
        assert torch.equal(received.ages.long(), torch.where(came, step - last, 0))
        last = torch.where(came, step, last)


def test_without_a_residual_everything_is_one_step_old() -> None:
    given = parameters()
    wire = ages_of(given, "noef | topk(density=0.1)")
    for step in range(5):
        receive(given, step, ages=wire)
    received = wire.received(given[0])
    assert received is not None
    assert received.ages.unique().tolist() == [0, 1]


def test_a_skipped_step_ages_nothing_and_brings_nothing() -> None:
    given, others = parameters(), parameters()
    wire, uninterrupted = ages_of(given), ages_of(others)
    for step in range(4):
        receive(given, step, ages=wire)
        receive(others, step, ages=uninterrupted)
        if step == 2:
            wire.skip_step()
            received = wire.received(given[0])
            assert received is not None
            assert not received.mask.any()
    for name, since in wire.state_dict().items():
        assert torch.equal(since, uninterrupted.state_dict()[name])


def test_for_a_tensor_that_nobody_used_no_time_passes() -> None:
    given = parameters()
    wire = ages_of(given)
    receive(given, 0, ages=wire)
    before = wire.state_dict()
    wire.end_step({"p0": torch.zeros(given[0].shape)})
    after = wire.state_dict()
    assert torch.equal(after["p0"], before["p0"] + 1)
    assert torch.equal(after["p2"], before["p2"])
    received = wire.received(given[2])
    assert received is not None
    assert not received.mask.any()


def test_saved_ages_go_on_exactly() -> None:
    given = parameters()
    wire = ages_of(given)
    for step in range(5):
        receive(given, step, ages=wire)
    resumed = ages_of(given)
    resumed.load_state_dict(wire.state_dict())
    for step in range(5, 9):
        receive(given, step, ages=wire)
        receive(given, step, ages=resumed)
        for name, since in wire.state_dict().items():
            assert torch.equal(since, resumed.state_dict()[name])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"p0": torch.zeros(2000, dtype=torch.uint8)},
        {"p0": torch.zeros(2000, dtype=torch.uint8), "p2": torch.zeros(3, dtype=torch.uint8)},
        {"p0": torch.zeros(2000), "p2": torch.zeros(1320, dtype=torch.uint8)},
    ],
)
def test_ages_of_another_model_are_refused_and_change_nothing(state: dict[str, torch.Tensor]) -> None:
    given = parameters()
    wire = ages_of(given)
    receive(given, 0, ages=wire)
    before = wire.state_dict()
    with pytest.raises(CheckpointError, match="ages"):
        wire.load_state_dict(state)
    assert all(torch.equal(since, before[name]) for name, since in wire.state_dict().items())


def test_reset_forgets() -> None:
    given = parameters()
    wire = ages_of(given)
    receive(given, 0, share=0.0, ages=wire)
    wire.reset()
    receive(given, 1, share=1.0, ages=wire)
    received = wire.received(given[0])
    assert received is not None
    assert received.ages.unique().tolist() == [1]


def test_a_wire_is_found_by_its_parameters_until_it_is_detached_or_gone() -> None:
    given = parameters()
    assert wire_of(given[0]) is None
    wire = ages_of(given)
    assert all(wire_of(parameter) is wire for parameter in given)
    second = ages_of(given)
    wire.detach()  # detaching the first must not take the second away
    assert wire_of(given[0]) is second
    del second
    gc.collect()
    assert wire_of(given[0]) is None


def test_optimizers_say_that_they_read_ages() -> None:
    given = parameters()
    assert reads_ages(AdamW(given))
    assert reads_ages(SGD(given))
    assert not reads_ages(torch.optim.AdamW(given))
