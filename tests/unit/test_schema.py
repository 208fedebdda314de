"""JSON of the wrong shape: plans, probes, profiles, ledgers, groups and events load as they were written, or are refused by
the field that does not fit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.autopilot.active_plan import ActivePlan, read_active_plan
from thinwire.comm.trace import Span
from thinwire.core import CheckpointError, ConfigError, TensorSpec, ThinwireError, make
from thinwire.core.schema import MAX_DEPTH, from_json, to_json
from thinwire.fusion import Curve, ModelProfile, Noise
from thinwire.fusion.groups import GroupPlan, read_plans
from thinwire.fusion.profile import TensorProfile
from thinwire.observe.events import EventError, read_events
from thinwire.observe.html.page import write_html
from thinwire.observe.kinds import KINDS
from thinwire.observe.runs import load_contests
from thinwire.plan import Candidate, Cluster, CodecCost, ErrorLedger, Network, Plan, Probe
from thinwire.plan.collectives import KINDS as COLLECTIVES
from thinwire.plan.messages import Asked
from thinwire.plan.roofs import Roofs

LINE = Curve(((1e3, 1e-3), (1e6, 5e-2)))
COST = CodecCost(((Asked("all_reduce", 1.0),),), {2: (LINE, LINE), 8: (LINE, LINE)}, 0.5)
PLAN = Plan(
    compress="int4",
    fuse="auto",
    quality="safe",
    world_size=4,
    step_s=0.5,
    floor_s=0.25,
    dense_s=1.0,
    reasons=("because",),
    candidates=(
        Candidate(compress="int4", fuse="auto", step_s=0.5),
        Candidate(compress="dense", fuse="4MiB", step_s=1.0),
    ),
    roofline={"dense": {"flops": 1e9, "binding": "network"}},
    spans=(Span("backward", 0.0, 0.25), Span("wire", 0.25, 0.5, 0, 100)),
    sweep=({"bits_per_s": 1e6, "winner": "int4", "step_s": {"dense": 1.0}},),
    facts={"step": "18"},
    date="2026-01-01",
)
PROBE = Probe(
    cluster=Cluster(world_size=4, cores=2),
    network=Network(4, dict.fromkeys(COLLECTIVES, LINE), {}, 0.05),
    codecs={"dense": COST},
    roofs=Roofs(1e9, 1e10),
    facts={"link": "200mbit"},
)
PROFILE = ModelProfile(
    tensors=(TensorProfile(TensorSpec("w", (2, 3), torch.bfloat16), 0.1),),
    backward_s=0.2,
    noise={"w": Noise(1.0, 2.0)},
    errors={"int4": {"w": 0.1}},
)
GROUPS = [GroupPlan(("a", "b"), dense=("a",), density=0.25), GroupPlan(("c",))]
EVENTS: list[dict[str, Any]] = [
    {"kind": "run", "label": "x", "mode": "thinwire", "rank": 0, "world_size": 1, "settings": {"workload": {"seq": 8}}},
    *(
        {"kind": "step", "step": i, "step_s": 0.1, "elapsed_s": 0.1 * i, "loss": math.nan, "wait_s": 0.1}
        for i in range(4)
    ),
    {
        "kind": "plan",
        "step": 1,
        "compress": "int4",
        "fuse": "auto",
        "step_s": 1,
        "dense_s": 2,
        "floor_s": 1,
        "explanation": "",
    },
    {"kind": "trace", "step": 3, "rank": 0, "spans": to_json(PLAN.spans)},
    {"kind": "ledger", "step": 3, "noise": 1.0, "compression": 0.1, "worst_share": math.inf},
    {"kind": "eval", "step": 3, "elapsed_s": 0.5, "loss": 2.0},
    {"kind": "end", "steps": 4, "elapsed_s": 0.5},
]


def _ledger() -> dict[str, Any]:
    ledger = ErrorLedger()
    ledger.record("w", "noise", 1.0, 2.0)
    return ledger.to_json()


def _read_ledger(values: Any) -> dict[str, Any]:
    ledger = ErrorLedger()
    ledger.load_json(values)
    return ledger.to_json()


def _read_plan(values: Any) -> dict[str, Any]:
    plan = Plan.from_json(values)
    assert plan.explain()
    return plan.to_json()


def _active(values: Any) -> Any:
    return to_json(read_active_plan(json.dumps(values)))


ACTIVE = ActivePlan(PLAN, ["a", "b", "c"], 0.1, 0.5, 1.0, ledger=_ledger(), groups=tuple(GROUPS))
# By name: valid values, and what reads them and writes them again.
FORMS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "plan": (PLAN.to_json(), _read_plan),
    "probe": (PROBE.to_json(), lambda values: Probe.from_json(values).to_json()),
    "profile": (PROFILE.to_json(), lambda values: ModelProfile.from_json(values).to_json()),
    "ledger": (_ledger(), _read_ledger),
    "groups": (to_json(GROUPS), lambda values: to_json(read_plans(values, "abc"))),
    "active plan": (to_json(ACTIVE), _active),
}


# One of these is in every refusal, next to the field.
NAMING = ("expected", "is missing", "does not know", "must", "needs", "other parameters", "no JSON")


def _attempt(action: Callable[[], Any]) -> tuple[str | None, Any]:
    """What was said, if it was refused by one of our errors; else what came out."""
    try:
        return None, action()
    except (ConfigError, CheckpointError, EventError) as error:
        return str(error), None


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


WRONG = [
    None,
    True,
    -1,
    0,
    3,
    2.5,
    1e308,
    10**400,
    math.nan,
    math.inf,
    "",
    "12",
    "float32",
    [],
    {},
    [[]],
    {"x": 1},
    _deep(100),
]


def _places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, one in items:
        yield from _places(one, (*path, key))


def _mutated(values: Any, chance: random.Random) -> Any:
    """One place dropped, doubled, nested, or of another type."""
    path = chance.choice(list(_places(values)))
    if not path:
        return chance.choice(WRONG)
    values = deepcopy(values)
    parent = values
    for key in path[:-1]:
        parent = parent[key]
    last = path[-1]
    match chance.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[f"{last}?"] = parent[last]
        case 1:
            parent.append(parent[last])
        case 2:
            parent[last] = {"inner": parent[last]}
        case _:
            parent[last] = chance.choice(WRONG)
    return values


def _same(left: Any, right: Any) -> bool:
    """Equal, or more than was given: defaults are written too."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(key in right and _same(one, right[key]) for key, one in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) <= len(right) and all(_same(*pair) for pair in zip(left, right, strict=False))
    return bool(left == right) or (left != left and right != right)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=1000)
@given(seed=st.integers(min_value=0, max_value=1 << 32))
def test_mutated_values_load_as_they_are_or_are_refused_by_field(form: str, seed: int) -> None:
    valid, again = FORMS[form]
    values = _mutated(valid, random.Random(seed))
    said, read = _attempt(lambda: again(values))
    assert _same(values, read) if said is None else any(word in said for word in NAMING), said


@pytest.mark.parametrize("form", FORMS)
def test_what_was_written_is_read(form: str) -> None:
    valid, again = FORMS[form]
    assert again(json.loads(json.dumps(valid))) == valid


@pytest.mark.parametrize(
    ("form", "path", "value", "said"),
    [
        ("plan", ("candidates", 1, "step_s"), "fast", "candidates[1].step_s is 'fast', expected a finite number"),
        ("plan", ("candidates", 1, "step_s"), math.nan, "candidates[1].step_s is nan"),
        ("plan", ("quality",), "best", "quality is 'best', expected one of"),
        ("plan", ("spans", 1, "group"), 0.5, "spans[1].group is 0.5, expected a whole number"),
        ("plan", ("floor_s",), 0, "floor_s is 0"),
        ("plan", ("sweep", 0, "step_s"), _deep(MAX_DEPTH + 1), "sweep[0]['step_s'] is"),
        ("probe", ("network", "wire", "all_reduce", 1), [1], "network.wire['all_reduce'][1] is [1], expected a list of 2"),
        ("probe", ("network", "wire", "all_reduce", 1), [10, 2], "network.wire['all_reduce']: the sizes"),
        ("probe", ("codecs", "dense", "stages"), {"two": []}, "a key of codecs['dense'].stages is 'two'"),
        ("probe", ("codecs", "dense", "rounds", 0, 0), ["all_reduce"], "codecs['dense'].rounds[0][0].share is missing"),
        ("probe", ("cluster", "cores"), 0, "cluster: cores is 0; expected at least 1"),
        ("profile", ("tensors", 0, "dtype"), "float3", "tensors[0]: dtype is 'float3'"),
        ("profile", ("noise", "w"), {"signal": 1}, "noise['w'].signal is 1, expected no such field"),
        ("ledger", ("accounts", "w"), {"luck": [0, 0, 0]}, "a key of accounts['w'] is 'luck', expected one of"),
        ("active plan", ("plan", "version"), 2, "plan.version is 2, expected 1"),
        ("active plan", ("groups", 0, "density"), 2, "groups[0]: density is 2"),
        ("active plan", ("ledger", "accounts", "w", "noise"), [1, 2], "accounts['w']['noise'] is [1, 2]"),
    ],
)  # fmt: skip
def test_the_field_is_named(form: str, path: tuple[Any, ...], value: Any, said: str) -> None:
    valid, again = FORMS[form]
    values = deepcopy(valid)
    parent = values
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(ThinwireError) as caught:
        again(values)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", [Plan, Probe, ModelProfile])
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"[" * 100_000, b"9" * 10_000, b"null", None])
def test_files_that_are_no_json(tmp_path: Path, kind: Any, content: bytes | None) -> None:
    path = tmp_path / "file.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match="again"):
        kind.load(path)


def test_a_whole_float_is_a_whole_number() -> None:
    assert from_json(Cluster, {"world_size": 4.0}, what="cluster", remedy="").world_size == 4


@settings(max_examples=1000)
@given(seed=st.integers(min_value=0, max_value=1 << 32))
def test_mutated_events_are_reported_or_refused_by_field(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("run") / "rank0.jsonl"
    events = [{"v": 1, **event} for event in EVENTS]
    chance = random.Random(seed)
    place = chance.randrange(len(events))
    events[place] = _mutated(events[place], chance)
    path.write_text("\n".join(map(json.dumps, events)))
    said, contests = _attempt(lambda: load_contests([path]))
    assert contests[0].runs[0].training_loss() if said is None else "rank0.jsonl" in said


@pytest.mark.parametrize("seed", range(12))
def test_pages_can_be_made_of_what_was_accepted(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        events = [{"v": 1, **event} for event in EVENTS]
        place = chance.randrange(len(events))
        events[place] = _mutated(events[place], chance)
        (tmp_path / "rank0.jsonl").write_text("\n".join(map(json.dumps, events)))
        try:
            contests = load_contests([tmp_path])
        except EventError:
            continue
        write_html(contests, tmp_path / "page.html")
        return


def test_an_event_is_named_by_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"v": 1, "kind": "lab"}\n{"v": 1, "kind": "step", "step": 1, "step_s": "long", "elapsed_s": 1}\n')
    assert len(list(read_events(path))) == 2, "nobody reads its fields"
    with pytest.raises(EventError, match=r"rank0.jsonl:2 does not fit: step_s is 'long', expected a finite number"):
        list(read_events(path, KINDS))


@pytest.mark.parametrize(
    "text",
    [
        "ef | " * 10_000 + "int4",
        "(" * 10_000 + "int4" + ")" * 10_000,
        "ef | " * 100 + "int4",
        "-" * 900 + "int4",
        f"topk(density={'-' * 900}1)",
        f"topk(density={'[' * 190}{']' * 190})",
        "\0",
        7,
        None,
    ],
)
def test_deeply_nested_specs_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"compressor|number"):
        make(text)
