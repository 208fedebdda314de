"""A state that is refused has changed nothing: every field of ``wire.state_dict()``, broken in every way we know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from gloo.support import Net, digest, seeded, sgd, train
from thinwire.autopilot.controller import PLANNING_STEPS
from thinwire.wire.attached import Attached

pytestmark = pytest.mark.gloo

NAN, INF = float("nan"), float("inf")
WRONG: list[Any] = [None, -1, 2.5, NAN, 10**30, True, "x", b"x", [], [3], {}, {"x": 1}, {1: 2}, torch.ones(2), object()]


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def parent_of(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        state = state[key]
    return state


def broken_tensors(good: Tensor) -> Iterator[Any]:
    yield good.double() if good.is_floating_point() else good.float()
    yield good[:-1]
    yield good.reshape(1, -1)
    yield good.to("meta")
    yield good.to_sparse()
    yield good.tolist()
    for value in (NAN, INF, -INF) if good.is_floating_point() else ():
        bad = good.clone()
        bad[-1] = value
        yield bad


def may_be(path: tuple[Any, ...], value: Any) -> bool:
    """Whether this value is as good as the one that is there."""
    if path == ("plan",):
        return value is None or value == "x"  # no plan yet is a state, too; broken texts come later
    if path == ("seed",):
        return type(value) is int
    return (path[-1] in ("dense", "hosted") and value == []) or (path[-1] == "density" and value is None)


def broken(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """States that are like ``state`` but for one thing, by that thing."""
    for path in places(state):
        good = parent_of(state, path)[path[-1]]
        for value in broken_tensors(good) if isinstance(good, Tensor) else WRONG:
            if not isinstance(value, Tensor) and (may_be(path, value) or (value == good and type(value) is type(good))):
                continue
            changed = deepcopy(state)
            parent_of(changed, path)[path[-1]] = value
            yield f"{path} = {value!r:.60}", changed
        if path[-1] not in ("dense", "hosted", "density"):  # those have defaults
            changed = deepcopy(state)
            del parent_of(changed, path)[path[-1]]
            yield f"{path} missing", changed
    for path in [(), *places(state)]:
        if isinstance(parent_of(state, (*path, "any")), dict):
            changed = deepcopy(state)
            parent_of(changed, (*path, "extra"))["extra"] = torch.ones(3)
            yield f"{(*path, 'extra')}", changed


def broken_groups(state: dict[str, Any]) -> Iterator[Any]:
    (first, *rest), name = state["fusion"], state["fusion"][0]["names"][0]
    yield rest
    yield [first, *rest, first]
    yield [*rest, {**first, "names": [*first["names"], name]}]
    yield [*rest, {**first, "names": [*first["names"][1:], "nobody"]}]
    yield [*rest, {**first, "dense": ["nobody"]}]
    yield [*rest, {**first, "hosted": ["nobody"]}]
    for density in (0, -0.5, 2, NAN, INF):
        yield [*rest, {**first, "density": density}]


def broken_plans(text: str) -> Iterator[Any]:
    """Texts, and values inside the text."""
    yield from ("", "{", "null", "[]", "[" * 100_000, text[:-1], text.encode(), 3)
    values = json.loads(text)
    for path in places(values):
        for value in ("x", -1, NAN, [[]], {"x": 1}):
            changed = deepcopy(values)
            parent = parent_of(changed, path)
            if type(parent[path[-1]]) is type(value) or path[-1] == "relative_error" or path[:2] == ("plan", "facts"):
                continue
            parent[path[-1]] = value
            yield json.dumps(changed)
    for path, value in (
        (("plan", "compress"), "zip"),
        (("plan", "compress"), "ef | " * 5000 + "int4"),
        (("plan", "fuse"), "everything"),
        (("order",), ["nobody"]),
        (("groups",), [{"names": ["nobody"]}]),
        (("ledger", "accounts"), {"w": {"luck": [1, 1, 1]}}),
        (("ledger", "accounts"), {"w": {"noise": [1, 1]}}),
        (("ledger", "accounts"), {"w": {"noise": [1, -1, 1]}}),
        (("ledger", "accounts"), [1]),
        (("ledger", "version"), 9),
    ):
        changed = deepcopy(values)
        parent_of(changed, path)[path[-1]] = value
        yield json.dumps(changed)


def all_broken(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from broken(state)
    yield from ((f"('fusion',) = {groups}", {**state, "fusion": groups}) for groups in broken_groups(state))
    if state["plan"] is not None:
        yield from ((f"('plan',) = {text!r:.2000}", {**state, "plan": text}) for text in broken_plans(state["plan"]))
    yield from ((f"('checkpoint',) = {one}", one) for one in (None, [], 3, "x", {1: 2}))


def refusal(wire: Attached, state: Any) -> str | None:
    try:
        wire.load_state_dict(state)
    except thinwire.CheckpointError as error:
        return str(error)
    return None


def refuse_all(wire: Attached, states: Iterator[tuple[str, Any]]) -> int:
    """Load every one of them; each must be refused by its field, and leave the wire as it was."""
    before, count = digest(wire.state_dict()), 0
    plan, ledger = wire.plan, None if wire.ledger is None else wire.ledger.to_json()
    for change, state in states:
        said = refusal(wire, state)
        assert said is not None, f"accepted {change}"
        assert any(key in said for key in change.split("'")[1::2]), f"{change} is not named: {said}"
        count += 1
        if count % 16 == 0:
            assert digest(wire.state_dict()) == before, change
    assert digest(wire.state_dict()) == before
    assert wire.plan is plan
    assert wire.ledger is None or wire.ledger.to_json() == ledger
    return count


@pytest.mark.parametrize("compress", ["topk(density=0.1)", "int4", "momentum(mu=0.9) | topk(density=0.1)"])
@pytest.mark.filterwarnings("ignore:SGD does not know")
def test_refused_states_change_nothing(single_rank_group: None, compress: str) -> None:
    runs = []
    for refusing in (False, True):
        model = seeded(Net)
        optimizer = sgd(model)
        with thinwire.attach(model, optimizer, compress=compress) as wire:
            train(model, optimizer, 0, range(3))
            if refusing:
                assert refuse_all(wire, all_broken(wire.state_dict())) > 200
            wire.load_state_dict(wire.state_dict())
            train(model, optimizer, 0, range(3, 6))
            runs.append(digest({**model.state_dict(), "wire": wire.state_dict()}))
    assert runs[0] == runs[1], "training goes on as if nothing had been tried"


def test_refused_plans_change_nothing(single_rank_group: None) -> None:
    model = seeded(Net)
    optimizer = sgd(model)
    with thinwire.attach(model, optimizer) as wire:
        train(model, optimizer, 0, range(PLANNING_STEPS + 2))
        assert wire.plan is not None
        assert wire.ledger is not None
        wire.ledger.record("first.weight", "noise", 1.0, 2.0)
        state = wire.state_dict()
        assert refuse_all(wire, all_broken(state)) > 300
        wire.load_state_dict(state)
        train(model, optimizer, 0, range(2))
        assert digest({**wire.state_dict(), "step": state["step"]}) == digest(state)
