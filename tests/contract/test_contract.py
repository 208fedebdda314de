"""The contract: every law, for every registered compressor, raw and as ``attach`` would wrap it."""

from __future__ import annotations

import pytest
import torch

import thinwire
from contract.laws import LAWS, Law
from contract.menagerie import BY_NAME
from contract.world import run_unit
from thinwire.core import Compressor
from thinwire.core.registry import compressor_class
from thinwire.fusion.prepare import prepare
from thinwire.wrappers import with_feedback

UNBIASED = ("qsgd",)


def subjects() -> dict[str, Compressor]:
    """All examples of all registered classes, by their text: as written, with feedback, and as attach prepares them."""
    examples = [example for listing in thinwire.available() for example in compressor_class(listing.name).examples()]
    variants = [variant for one in examples for variant in (one, with_feedback(one), prepare(one))]
    return {str(variant): variant for variant in variants}


@pytest.mark.parametrize(
    ("compressor", "law"),
    [pytest.param(c, law, id=f"{text}-{law.__name__}") for text, c in subjects().items() for law in LAWS],
)
def test_law(compressor: Compressor, law: Law) -> None:
    law(compressor)


def test_every_registered_name_has_an_example() -> None:
    for listing in thinwire.available():
        names = {type(example).__name__ for example in compressor_class(listing.name).examples()}
        assert names == {compressor_class(listing.name).__name__}, listing.name


@pytest.mark.parametrize("text", [text for text, c in subjects().items() if c.name in UNBIASED])
def test_unbiased(text: str) -> None:
    """The average of many draws approaches x within six standard errors, entry by entry."""
    specimen, draws = BY_NAME["prime"], 300
    x = specimen.gradient(0, 0)
    means = torch.stack(
        [run_unit(thinwire.make(text), specimen.unit, [[x]], i)[0].results[0].mean for i in range(draws)]
    )
    # An entry close to a level is rarely rounded away, so its own spread is no estimate; the largest spread is.
    deviation = float(means.std(dim=0).max())
    assert deviation > 0, "it does not draw at all"
    assert float((means.mean(dim=0) - x).abs().max()) <= 6 * deviation / draws**0.5
