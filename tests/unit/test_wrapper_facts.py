"""Wrappers pass on the facts of what they wrap, and no promise that they do not keep themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import thinwire
from thinwire.comm import simulate
from thinwire.compressors.topk import TopK
from thinwire.core import Compressor, Step, TensorSpec, UnitSpec, Wrapper
from thinwire.core.registry import compressor_class

WRAPPERS = [listing.name for listing in thinwire.available() if listing.wrapper]
OTHERWISE = {  # what a wrapper says for itself
    "hierarchical": {"rounds": None, "exact_bytes": False},
    "hypernet": {"needs_weights": True, "exact_bytes": False, "sparse": True},
    "normgreedy": {"exact_bytes": False, "sparse": True},
    "roundrobin": {"exact_bytes": False, "sparse": True},
    "accordion": {"exact_bytes": False},
    "lgreco": {"exact_bytes": False},
}
UNIT = UnitSpec((TensorSpec("weight", (64, 64)),))


@dataclass(frozen=True, kw_only=True)
class Told(TopK):
    """Says of itself what it is told to say; promises everything."""

    yes: bool = True

    @property
    def rounds(self) -> int | None:
        return 7 if self.yes else None

    @property
    def sparse(self) -> bool:
        return self.yes

    @property
    def exact_bytes(self) -> bool:
        return self.yes

    @property
    def needs_weights(self) -> bool:
        return self.yes

    @property
    def needs_importance(self) -> bool:
        return self.yes

    @property
    def checks_finite(self) -> bool:
        return True

    def adds_residual(self, step: Step) -> bool:
        return True


def wrapped(name: str, inner: Compressor) -> Wrapper:
    made = compressor_class(name)(inner=inner)  # type: ignore[call-arg]
    assert isinstance(made, Wrapper)
    return made


@pytest.mark.parametrize("yes", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_facts_are_passed_on(name: str, yes: bool) -> None:
    inner = Told(yes=yes)
    outer, otherwise = wrapped(name, inner), OTHERWISE.get(name, {})
    for fact in ("rounds", "sparse", "exact_bytes", "needs_weights", "needs_importance"):
        assert getattr(outer, fact) == otherwise.get(fact, getattr(inner, fact)), fact


@pytest.mark.parametrize("name", WRAPPERS)
def test_promises_are_not(name: str) -> None:
    outer = wrapped(name, Told())
    assert outer.checks_finite == (name == "ef"), "only error feedback sees all values in a pass of its own"
    assert not outer.adds_residual(Step(0, UNIT))


def test_what_waits_outside_a_message_is_checked_too() -> None:
    """A layer that is not picked adds to the residual; a sum that overflows there must not be committed."""
    compressor = thinwire.make(
        "roundrobin(budget=0.3, warmup=0, always_bytes=0, merge_bytes=0) | ef | topk(density=0.1)"
    )
    unit = UnitSpec(tuple(TensorSpec(f"{i}.weight", (64, 64)) for i in range(4)))
    told: list[int] = []
    state = compressor.init(unit)
    for index in range(4):
        step = Step(index, unit, on_not_finite=lambda index=index: told.append(index))  # type: ignore[misc]
        (done,) = simulate([compressor.exchange(torch.full((unit.numel,), 2e38), state, step)])
        state = done.state
        assert torch.isfinite(state["residual"]).all(), index
    assert told, "four times 2e38 is more than fp32 holds"
