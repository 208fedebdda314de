"""State at rest: by parameter name, whatever the units were; nothing foreign is loaded."""

from __future__ import annotations

import pytest
import torch

from thinwire.core import CheckpointError, State, TensorSpec, UnitSpec, make
from thinwire.engine.groups import Unit
from thinwire.engine.states import StateStore, cut, join

TENSORS = [TensorSpec("a", (2, 3)), TensorSpec("b", (4,)), TensorSpec("c", ())]
COMPRESSOR = make("ef | powersgd(rank=2)")


def _unit(*tensors: TensorSpec) -> Unit:
    return Unit(UnitSpec(tensors), COMPRESSOR)


def _counted(unit: Unit, start: float) -> State:
    state = COMPRESSOR.init(unit.spec)
    return {key: torch.arange(value.numel(), dtype=torch.float32) + start for key, value in state.items()}


def test_cut_and_join_are_inverse() -> None:
    unit = _unit(*TENSORS)
    state = _counted(unit, 1)
    pieces = cut(state, unit)
    assert {name: piece["residual"].numel() for name, piece in pieces.items()} == {"a": 6, "b": 4, "c": 1}
    again = join([pieces[tensor.fqn] for tensor in TENSORS], COMPRESSOR)
    assert all(torch.equal(again[key], value) for key, value in state.items())


def test_state_follows_its_tensor_into_other_units() -> None:
    store = StateStore(TENSORS, COMPRESSOR)
    whole, first, rest = _unit(*TENSORS), _unit(TENSORS[2], TENSORS[0]), _unit(TENSORS[1])
    store.of(whole)
    store.commit({whole: _counted(whole, 10)})
    before = store.by_name()
    moved = store.of(first)
    assert moved["residual"].tolist() == [20.0, *range(10, 16)]
    assert store.of(rest)["residual"].tolist() == [16.0, 17.0, 18.0, 19.0]
    after = store.by_name()
    assert all(torch.equal(after[name][key], value) for name, piece in before.items() for key, value in piece.items())


def test_untouched_tensors_keep_their_state() -> None:
    store = StateStore(TENSORS, COMPRESSOR)
    whole = _unit(*TENSORS)
    store.of(whole)
    store.commit({whole: _counted(whole, 10)})
    store.commit({whole: _counted(whole, 50)}, untouched={"b"})
    assert store.of(whole)["residual"].tolist() == [*range(50, 56), *range(16, 20), 60.0]


def test_by_name_is_a_copy() -> None:
    store = StateStore(TENSORS, COMPRESSOR)
    store.by_name()["a"]["residual"].fill_(9)
    assert float(store.by_name()["a"]["residual"].sum()) == 0.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda pieces: pieces.pop("a"), r"missing \['a'\]"),
        (lambda pieces: pieces.update(z={}), r"unexpected \['z'\]"),
        (lambda pieces: pieces["b"].pop("q"), r"state of b .* missing \['q'\]"),
        (lambda pieces: pieces["b"].update(residual=torch.zeros(5)), "residual of b has 5 elements, expected 4"),
        (lambda pieces: pieces["a"].update(residual=torch.zeros(2, 3)), "residual of a"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, problem: str) -> None:  # type: ignore[no-untyped-def]
    store = StateStore(TENSORS, COMPRESSOR)
    whole = _unit(*TENSORS)
    store.of(whole)
    store.commit({whole: _counted(whole, 10)})
    pieces = store.by_name()
    change(pieces)
    with pytest.raises(CheckpointError, match=problem):
        store.load(pieces)
    assert store.of(whole)["residual"].tolist() == list(range(10, 21))


def test_load_replaces_everything() -> None:
    store, other = (StateStore(TENSORS, COMPRESSOR) for _ in range(2))
    whole = _unit(*TENSORS)
    other.of(whole)
    other.commit({whole: _counted(whole, 3)})
    store.of(whole)
    store.load(other.by_name())
    assert torch.equal(store.of(whole)["residual"], other.of(whole)["residual"])


def test_what_another_compressor_does_not_use_is_set_aside() -> None:
    """A fusion plan may send a tensor dense for a while; what its own compressor knew must be there afterwards."""
    store = StateStore(TENSORS, COMPRESSOR)
    whole = _unit(*TENSORS)
    store.of(whole)
    store.commit({whole: _counted(whole, 7)})
    before = store.by_name()
    dense = Unit(UnitSpec((TENSORS[0],)), make("ef | dense"))
    assert store.of(dense).keys() == {"residual"}
    assert {name: state.keys() for name, state in store.by_name().items()} == {n: s.keys() for n, s in before.items()}
    store.load(store.by_name())
    again = store.of(whole)
    assert all(torch.equal(again[key], value) for key, value in _counted(whole, 7).items())


def test_another_compressor_inherits_residuals() -> None:
    store = StateStore(TENSORS, COMPRESSOR)
    whole = _unit(*TENSORS)
    store.of(whole)
    store.commit({whole: _counted(whole, 10)})
    after = store.converted(make("ef | topk(density=0.5)"))
    assert after.by_name()["b"]["residual"].tolist() == [16.0, 17.0, 18.0, 19.0]
    assert after.by_name()["b"].keys() == {"residual"}
    assert not after.carried


def test_what_is_owed_joins_the_next_gradient_that_counts() -> None:
    """Dense keeps no residual, so what the one before owed goes into a gradient, once, and not before a step counts."""
    store = StateStore(TENSORS, COMPRESSOR)
    whole = _unit(*TENSORS)
    store.of(whole)
    store.commit({whole: _counted(whole, 10)})
    after = store.converted(make("dense"))
    unit = Unit(UnitSpec((TENSORS[1], TENSORS[2])), make("dense"))
    for _ in range(2):  # a step that is skipped changes nothing
        x = torch.ones(5)
        after.add_carried(unit, x)
        assert x.tolist() == [17.0, 18.0, 19.0, 20.0, 21.0]
    after.of(unit)
    after.commit({unit: {}}, untouched={"c"})
    assert sorted(after.carried) == ["a", "c"]
    back = after.converted(COMPRESSOR)  # nothing is lost on the way back either
    assert back.by_name()["a"]["residual"].tolist() == list(range(10, 16))
    assert back.by_name()["b"]["residual"].tolist() == [0.0] * 4


@pytest.mark.parametrize("carried", [{"z": torch.ones(4)}, {"b": torch.ones(5)}])
def test_foreign_debts_are_refused(carried: dict[str, torch.Tensor]) -> None:
    store = StateStore(TENSORS, make("dense"))
    with pytest.raises(CheckpointError, match="do not fit"):
        store.load(store.by_name(), carried)
    store.load(store.by_name(), {"b": torch.ones(4)})
    assert store.carried["b"].tolist() == [1.0] * 4
