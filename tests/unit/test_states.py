"""State at rest: by parameter name, whatever the units were; nothing foreign is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.core import CheckpointError, Compressor, State, TensorSpec, UnitSpec, make
from thinwire.exchange import states
from thinwire.fusion.groups import Group, Unit
from thinwire.fusion.prepare import prepare

TENSORS = [TensorSpec("a", (2, 3)), TensorSpec("b", (4,)), TensorSpec("c", ())]
COMPRESSOR = make("ef | powersgd(rank=2)")


def unit_of(*tensors: TensorSpec, compressor: Compressor = COMPRESSOR) -> Unit:
    return Unit(UnitSpec(tensors), compressor)


def bind(units: Sequence[Unit], pieces: states.ByName) -> tuple[states.ByUnit, states.ByName]:
    return states.bind([Group((unit,)) for unit in units], pieces)


def counted(unit: Unit, start: float) -> State:
    state = COMPRESSOR.init(unit.spec)
    return {key: torch.arange(value.numel(), dtype=torch.float32) + start for key, value in state.items()}


def pieces_of(start: float) -> states.ByName:
    """The state of all three tensors at rest, after they travelled as one unit."""
    whole = unit_of(*TENSORS)
    return states.at_rest({whole: counted(whole, start)}, {tensor.fqn: {} for tensor in TENSORS})


def test_cut_and_bind_are_inverse() -> None:
    unit = unit_of(*TENSORS)
    state = counted(unit, 1)
    pieces = states.cut(state, unit)
    assert {name: piece["residual"].numel() for name, piece in pieces.items()} == {"a": 6, "b": 4, "c": 1}
    again, aside = bind([unit], pieces)
    assert all(torch.equal(again[unit][key], value) for key, value in state.items())
    assert aside == {"a": {}, "b": {}, "c": {}}


def test_state_follows_its_tensor_into_other_units() -> None:
    before = pieces_of(10)
    first, rest = unit_of(TENSORS[2], TENSORS[0]), unit_of(TENSORS[1])
    bound, aside = bind([first, rest], before)
    assert bound[first]["residual"].tolist() == [20.0, *range(10, 16)]
    assert bound[rest]["residual"].tolist() == [16.0, 17.0, 18.0, 19.0]
    after = states.at_rest(bound, aside)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name][key], value) for name, piece in before.items() for key, value in piece.items())


def test_tensors_that_nobody_used_keep_their_state() -> None:
    whole = unit_of(*TENSORS)
    old, new = counted(whole, 10), counted(whole, 50)
    merged = states.with_kept(whole, old, new, {"b"})
    assert merged["residual"].tolist() == [*range(50, 56), *range(16, 20), 60.0]
    assert old["residual"].tolist() == list(range(10, 21)), "states are values: nothing is written into them"
    assert new["residual"].tolist() == list(range(50, 61))


def test_at_rest_is_a_copy() -> None:
    unit = unit_of(*TENSORS)
    in_use, aside = bind([unit], pieces_of(0))
    in_use[unit]["residual"].zero_()
    states.at_rest(in_use, aside)["a"]["residual"].fill_(9)
    assert float(in_use[unit]["residual"].sum()) == 0.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda pieces: pieces.pop("a"), r"missing \['a'\]"),
        (lambda pieces: pieces.update(z={}), r"unexpected \['z'\]"),
        (lambda pieces: pieces.update(a=[]), "state of a: got a list, expected a dictionary"),
        (lambda pieces: pieces["b"].pop("q"), r"state of b: missing \['q'\]"),
        (lambda pieces: pieces["b"].update(residual=torch.zeros(5)), "residual of b has 5 elements, expected 4"),
        (lambda pieces: pieces["a"].update(residual=torch.zeros(2, 3)), "residual of a"),
        (lambda pieces: pieces["a"].update(residual=[0.0] * 6), "residual of a is a list"),
        (lambda pieces: pieces["a"].update(residual=torch.zeros(6, dtype=torch.bfloat16)), "residual of a is torch.bf"),
        (lambda pieces: pieces["a"]["residual"].fill_(float("inf")), "residual of a is not finite"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Any], Any], problem: str) -> None:
    pieces = pieces_of(10)
    states.check(pieces, {}, TENSORS, COMPRESSOR)
    change(pieces)
    with pytest.raises(CheckpointError, match=problem):
        states.check(pieces, {}, TENSORS, COMPRESSOR)


def test_what_another_compressor_does_not_use_is_set_aside() -> None:
    """A fusion plan may send a tensor dense for a while; what its own compressor knew must be there afterwards."""
    before = pieces_of(7)
    dense = unit_of(TENSORS[0], compressor=make("ef | dense"))
    others = unit_of(*TENSORS[1:])
    bound, aside = bind([dense, others], before)
    assert bound[dense].keys() == {"residual"}
    after = states.at_rest(bound, aside)
    assert {name: state.keys() for name, state in after.items()} == {n: s.keys() for n, s in before.items()}
    states.check(after, {}, TENSORS, COMPRESSOR)
    whole = unit_of(*TENSORS)
    again, _ = bind([whole], after)
    assert all(torch.equal(again[whole][key], value) for key, value in counted(whole, 7).items())


def test_another_compressor_inherits_residuals() -> None:
    after, carried = states.convert(TENSORS, (pieces_of(10), {}, COMPRESSOR), make("ef | topk(density=0.5)"))
    assert after["b"]["residual"].tolist() == [16.0, 17.0, 18.0, 19.0]
    assert after["b"].keys() == {"residual"}
    assert not carried


def test_a_residual_that_has_no_place_is_carried_and_comes_back() -> None:
    """Dense keeps no residual, so it goes into the next input that commits; nothing is lost on the way back either."""
    dense = make("dense")
    after, carried = states.convert(TENSORS, (pieces_of(10), {}, COMPRESSOR), dense)
    assert after == {"a": {}, "b": {}, "c": {}}
    assert carried["b"].tolist() == [16.0, 17.0, 18.0, 19.0]
    del carried["b"]  # it was sent
    back, still = states.convert(TENSORS, (after, carried, dense), COMPRESSOR)
    assert back["a"]["residual"].tolist() == list(range(10, 16))
    assert back["b"]["residual"].tolist() == [0.0] * 4
    assert not still


def test_what_was_carried_and_the_residual_add_up() -> None:
    carried = {"b": torch.ones(4)}
    after, still = states.convert(TENSORS, (pieces_of(10), carried, COMPRESSOR), make("ef | topk(density=0.5)"))
    assert after["b"]["residual"].tolist() == [17.0, 18.0, 19.0, 20.0]
    assert not still
    _, still = states.convert(TENSORS, (pieces_of(10), carried, COMPRESSOR), make("dense"))
    assert still["b"].tolist() == [17.0, 18.0, 19.0, 20.0]
    assert carried["b"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("carried", "problem"),
    [
        ({"z": torch.ones(4)}, "carried: got a residual for 'z'"),
        ({"b": torch.ones(5)}, "carried for b has 5 elements, expected 4"),
        ({"b": torch.full((4,), float("nan"))}, "carried for b is not finite"),
    ],
)
def test_foreign_carried_residuals_are_refused(carried: dict[str, Tensor], problem: str) -> None:
    dense = make("dense")
    pieces = states.initial(TENSORS, dense)
    with pytest.raises(CheckpointError, match=problem):
        states.check(pieces, carried, TENSORS, dense)
    states.check(pieces, {"b": torch.ones(4)}, TENSORS, dense)


def test_a_takeover_keeps_all_residuals() -> None:
    """Formats of one and two bits keep a residual of the mean besides the rank's own."""
    tensor = TensorSpec("w", (64, 64))
    former, later = prepare("int2"), prepare("dense")
    state = former.route(tensor).init(UnitSpec((tensor,)))
    state = {key: torch.full_like(value, 1.0 + index) for index, (key, value) in enumerate(state.items())}
    assert len(state) == 2
    _, carried = states.convert([tensor], ({"w": state}, {}, former), later)
    assert torch.equal(carried["w"], torch.full((64 * 64,), 3.0))
