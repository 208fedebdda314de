"""A channel at rest: what is saved while transactions are open, and that a refused load or change changes nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.channels import TENSORS, TwoRounds, exchange, fill, link_of, make_channel, noise, saved, states_of
from sim.threads import ThreadedWorld, run_ranks
from thinwire.core import CheckpointError, ConfigError, make
from thinwire.core.schema import to_json
from thinwire.exchange import Channel
from thinwire.fusion.groups import GroupPlan
from thinwire.fusion.prepare import prepare

SPECS = ("topk(density=0.2)", "int4", "powersgd(rank=1)", "momentum(mu=0.9) | topk(density=0.2)")
OTHER_PLAN = [GroupPlan(("d", "b")), GroupPlan(("a", "c"))]
NAN = float("nan")
Change = Callable[[dict[str, Any]], Any]


def everything(channel: Channel) -> tuple[object, ...]:
    """What a refused load must leave as it was, also what is not saved."""
    in_use = {unit: {k: v.numpy().tobytes() for k, v in state.items()} for unit, state in channel.states.items()}
    return saved(channel), in_use, channel.plan, channel.groups, channel.compressor, channel.index, channel.seed


def test_what_is_saved_holds_no_open_transaction() -> None:
    """The index is that of the oldest one open: whoever loads it begins those again."""
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        before = states_of(channel)
        one, other = channel.begin(["a"]), channel.begin(["b", "c"])
        assert (channel.index, channel.state_dict()["index"]) == (3, 1)
        for transaction in (one, other):
            fill(transaction, channel, 0, noise)
            transaction.close()
        assert states_of(channel) == before, "only wait() commits"
        assert other.wait().committed
        assert channel.state_dict()["index"] == 1
        assert one.wait().committed
        assert channel.state_dict()["index"] == 3
        assert states_of(channel) != before


def test_what_is_saved_is_a_copy() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        channel.use(prepare("dense"), [GroupPlan(("a", "b")), GroupPlan(("c", "d"))])
        before = everything(channel)
        state = channel.state_dict()
        for tensor in [*state["carried"].values(), *(v for piece in state["tensors"].values() for v in piece.values())]:
            tensor.fill_(7)
        state["groups"].clear()
        assert everything(channel) == before


@pytest.mark.parametrize("change", ["use a compressor", "use groups", "load"])
def test_nothing_is_changed_under_an_open_transaction(change: str) -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        state = channel.state_dict()
        transaction = channel.begin(["a"])
        before = everything(channel)
        with pytest.raises(ConfigError, match="while a transaction is open; wait for it first"):
            _change(channel, change, state)
        assert everything(channel) == before
        fill(transaction, channel, 0, noise)
        transaction.close()
        assert transaction.wait().committed
        _change(channel, change, state)
        assert everything(channel) != before


def _change(channel: Channel, change: str, state: dict[str, Any]) -> None:
    if change == "load":
        channel.load_state_dict(state)
    elif change == "use groups":
        channel.use(groups=OTHER_PLAN)
    else:
        channel.use(prepare("dense"))


def test_a_channel_that_would_change_the_order_of_a_busy_link_is_refused() -> None:
    """One mode holds for a link: mixed, the order in its second lane would depend on timing."""
    with link_of(ThreadedWorld(1, lanes=2), 0) as link:
        busy, quiet = make_channel(link, name="busy"), make_channel(link, name="quiet")
        state = quiet.state_dict()
        transaction = busy.begin()
        before = everything(quiet)
        with pytest.raises(ConfigError, match="only while it is idle"):
            quiet.use(TwoRounds())
        with pytest.raises(ConfigError, match="only while it is idle"):
            quiet.load_state_dict(state, TwoRounds())
        with pytest.raises(ConfigError, match="only while it is idle"):
            make_channel(link, TwoRounds(), name="third")
        assert everything(quiet) == before
        assert not link.rounds_in_lanes
        quiet.use(groups=OTHER_PLAN)  # the same rounds: no other order
        fill(transaction, busy, 0)
        transaction.close()
        assert transaction.wait().committed
        quiet.use(TwoRounds())
        assert link.rounds_in_lanes


@pytest.mark.parametrize("groups", [[], OTHER_PLAN[:1], [*OTHER_PLAN, OTHER_PLAN[0]], [GroupPlan(("a", "z"))]])
def test_groups_that_do_not_name_each_tensor_once_are_refused(groups: list[GroupPlan]) -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        before = everything(channel)
        with pytest.raises(ConfigError, match="expected each of its tensors once"):
            channel.use(groups=groups)
        with pytest.raises(ConfigError, match="expected each of its tensors once"):
            channel.use(prepare("dense"), groups)
        assert everything(channel) == before
        with pytest.raises(ConfigError, match="expected each of its tensors once"):
            make_channel(link, plans=groups, name="other")


def residual(value: Any) -> Change:
    return lambda state: state["tensors"]["a"].update(residual=value)


CHANGES: dict[str, Change] = {
    **{f"no {key}": lambda s, key=key: s.pop(key) for key in ("index", "seed", "groups", "tensors", "carried")},
    **{
        f"{key} of another type": lambda s, key=key: s.update({key: "7"})
        for key in ("index", "seed", "groups", "tensors", "carried")
    },
    "index is a bool": lambda s: s.update(index=True),
    "index below 0": lambda s: s.update(index=-1),
    "index too large for a header": lambda s: s.update(index=1 << 32),
    "index is a float": lambda s: s.update(index=3.0),
    "groups that are no mappings": lambda s: s.update(groups=[["a", "b", "c", "d"]]),
    "a group without names": lambda s: s["groups"][0].pop("names"),
    "a group missing": lambda s: s["groups"].pop(),
    "a group twice": lambda s: s["groups"].append(s["groups"][0]),
    "a group of nobody": lambda s: s["groups"].append({"names": ["z"]}),
    "a density that is none": lambda s: s["groups"][0].update(density=NAN),
    "dense names from elsewhere": lambda s: s["groups"][0].update(dense=["c"]),
    "a tensor missing": lambda s: s["tensors"].pop("a"),
    "a tensor more": lambda s: s["tensors"].update(z=s["tensors"]["a"]),
    "a state of another type": lambda s: s["tensors"].update(a=7),
    "a key missing": lambda s: s["tensors"]["a"].pop("residual"),
    "a key more": lambda s: s["tensors"]["a"].update(z=torch.zeros(48)),
    "a residual of another type": residual([0.0] * 48),
    "a residual of another length": residual(torch.zeros(47)),
    "a residual of another shape": residual(torch.zeros(6, 8)),
    "a residual of another dtype": residual(torch.zeros(48, dtype=torch.float64)),
    "a residual that is NaN": residual(torch.tensor([*[0.0] * 47, NAN])),
    "a residual that is infinite": residual(torch.tensor([*[0.0] * 47, float("inf")])),
    "carried for nobody": lambda s: s["carried"].update(z=torch.zeros(48)),
    "carried of another length": lambda s: s["carried"].update(a=torch.zeros(47)),
    "carried of another dtype": lambda s: s["carried"].update(a=torch.zeros(48, dtype=torch.float16)),
    "carried of another type": lambda s: s["carried"].update(a=7.0),
    "carried that is NaN": lambda s: s["carried"].update(a=torch.full((48,), NAN)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_refused_load_changes_nothing(change: str) -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        state = channel.state_dict()
        state["groups"] = to_json(OTHER_PLAN)
        channel.check_state(state, channel.compressor)
        exchange(channel, 0, make=noise)
        before = everything(channel)
        broken = copy.deepcopy(state)
        CHANGES[change](broken)
        with pytest.raises(CheckpointError):
            channel.load_state_dict(broken)
        assert everything(channel) == before
        channel.rollback()  # also what could be undone still can
        channel.load_state_dict(state)
        assert channel.index == 1
        assert channel.plan == OTHER_PLAN


def test_a_plan_with_densities_for_a_compressor_without_one_is_refused() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "int4")
        state = channel.state_dict()
        state["groups"][0]["density"] = 0.5
        before = everything(channel)
        with pytest.raises(CheckpointError, match="sets a density"):
            channel.load_state_dict(state)
        assert everything(channel) == before


def test_a_state_of_another_compressor_is_refused_unless_it_is_given() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel, former = make_channel(link, "dense"), make_channel(link, "powersgd(rank=1)", name="former")
        exchange(former, 0, make=noise)
        state, before = former.state_dict(), everything(channel)
        with pytest.raises(CheckpointError, match="unexpected"):
            channel.load_state_dict(state)
        assert everything(channel) == before
        channel.load_state_dict(state, former.compressor)
        assert states_of(channel) == states_of(former)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=5)
@given(at=st.integers(1, 4), regroup=st.booleans(), scale=st.sampled_from([1.0, 64.0]))
def test_save_load_and_go_on_equals_going_on(spec: str, at: int, regroup: bool, scale: float) -> None:
    """Bit for bit, over a file, also where groups change at that step; a loss scale leaves no trace in states."""
    straight, resumed = ThreadedWorld(2), ThreadedWorld(2)

    def work(rank: int) -> None:
        with link_of(straight, rank) as one, link_of(resumed, rank) as other:
            through, before = make_channel(one, spec, seed=3), make_channel(other, spec, seed=3)
            for step in range(6):
                if step == at:
                    file = io.BytesIO()
                    torch.save(before.state_dict(), file)
                    file.seek(0)
                    before = make_channel(other, spec, seed=99)
                    before.load_state_dict(torch.load(file, weights_only=True))
                    if regroup:
                        through.use(groups=OTHER_PLAN)
                        before.use(groups=OTHER_PLAN)
                expected, got = _scaled(through, rank, scale), _scaled(before, rank, scale)
                assert all(torch.equal(got.means[t.fqn], expected.means[t.fqn]) for t in TENSORS)
                assert saved(before) == saved(through)

    run_ranks(work, 2)


def _scaled(channel: Channel, rank: int, scale: float) -> Any:
    transaction = channel.begin(scale=scale)
    for tensor in TENSORS:
        transaction.add(tensor.fqn, scale * noise(tensor, rank, transaction.index))
    transaction.close()
    return transaction.wait()


def test_residuals_go_from_compressor_to_compressor() -> None:
    with link_of(ThreadedWorld(1), 0) as link:
        channel = make_channel(link, "topk(density=0.2)")
        exchange(channel, 0, make=noise)
        kept = channel.state_dict()["tensors"]["c"]["residual"]
        for spec in ("dense", "ef | powersgd(rank=1)", "ef | int4"):
            channel.use(make(f"route(min_elems=0, min_dims=0) | {spec}"))
        assert torch.equal(channel.state_dict()["tensors"]["c"]["residual"], kept)
        assert not channel.carried
