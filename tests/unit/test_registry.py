"""Names and text forms: specs parse and print, and every mistake is answered with what would be right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from thinwire.compressors.topk import TopK
from thinwire.core import AllReduce, Compressor, ConfigError, Exchange, Exchanged, State, Step, UnitSpec, make, register
from thinwire.core.registry import _registry
from thinwire.wrappers import ErrorFeedback

FIXED_NAMES = {"dense", "fp16", "bf16", "topk", "randomk", "threshold", "powersgd", "sign", "int8", "int4"}


@pytest.mark.parametrize(
    ("spec", "printed"),
    [
        ("topk", "topk(density=0.01)"),
        (" topk ( density = 0.25 ) ", "topk(density=0.25)"),
        ("topk(density=0.01) | fp16", "topk(density=0.01) | fp16"),
        ("topk(values='int8', indices='bitmap')", "topk(indices='bitmap', density=0.01) | int8"),
        ("powersgd(rank=2, reuse=False)", "powersgd(rank=2, reuse=False)"),
        ("momentum(mu=0.5) | ef | topk | bf16", "momentum(mu=0.5) | ef | topk(density=0.01) | bf16"),
        ("route(min_elems=8) | noef | sign", "route(min_elems=8) | noef | sign"),
        ("dense", "dense"),
    ],
)
def test_specs_parse_and_print(spec: str, printed: str) -> None:
    assert str(make(spec)) == printed
    assert make(printed) == make(spec)


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("topkk", "Did you mean 'topk'"),
        ("nothing_like_it", "Available: .*dense.*topk"),
        ("topk(density=)", "cannot read"),
        ("topk | ", "cannot read"),
        ("", "cannot read"),
        ("\0", "cannot read"),
        ("1 + 2", "cannot read"),
        ("topk.x", "cannot read"),
        ("topk(0.1)", "need names"),
        ("topk(ratio=0.1)", "no argument 'ratio'. It takes: .*density"),
        ("topk(**{'density': 0.1})", "no argument None"),
        ("dense(x=1)", "It takes: double"),
        ("sign(x=1)", "It takes: none"),
        ("topk(density=0.1, density=0.2)", "twice"),
        ("topk(density=foo())", "not a number"),
        ("topk(density={[]: 1})", "not a number"),
        ("topk(density=2)", "density is 2"),
        ("topk(density='much')", "density"),
        ("topk(density=True)", "density"),
        ("powersgd(rank=0)", "rank is 0"),
        ("powersgd(rank=2.5)", "rank"),
        ("powersgd(reuse=1)", "reuse"),
        ("qsgd(bits=8.0)", "bits"),
        ("qsgd(bits=5)", "bits is 5"),
        ("route(min_elems='many') | topk", "min_elems"),
        ("ef", "wraps a compressor"),
        ("dense | fp16", "cannot chain"),
        ("topk | fp16 | bf16", "cannot chain"),
        ("topk | qsgd(bits=4)", "cannot chain"),
        ("topk | sign", "unknown value format"),
        ("topk(indices='roman')", "unknown index coding"),
        ("threshold | int4", "count known beforehand"),
        ("momentum(mu=1.0) | topk", "mu is 1.0"),
        ("ef(decay=2) | topk", "decay is 2"),
    ],
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)


@given(st.text(alphabet="topk(density=0.1)|fp16 ef,'\"[]{}*\\\n\0", max_size=30))
def test_any_text_is_a_compressor_or_a_config_error(text: str) -> None:
    try:
        compressor = make(text)
    except ConfigError:
        return
    assert make(str(compressor)) == compressor


def test_compressors_pass_through() -> None:
    compressor = TopK(density=0.5)
    assert make(compressor) is compressor


def test_fixed_names_are_registered() -> None:
    assert {listing.name for listing in thinwire.available()} >= FIXED_NAMES


def test_listing_has_what_tables_show() -> None:
    by_name = {listing.name: listing for listing in thinwire.available()}
    assert list(by_name) == sorted(by_name)
    assert by_name["topk"].arguments == ("values", "indices", "density", "score")
    assert by_name["ef"].wrapper
    assert not by_name["topk"].wrapper
    assert by_name["ef"].arguments == ("decay",)
    for listing in by_name.values():
        assert listing.summary, listing.name
        assert listing.maturity in ("stable", "experimental"), listing.name


def test_a_taken_name_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(Compressor):
        def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
            return Exchanged((yield AllReduce(x)), None, state)

        def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
            return 0

    with pytest.raises(ConfigError, match="taken by TopK"):
        register("topk")(Other)
    assert _registry["topk"] is TopK


def test_wrappers_print_and_hash_by_what_they_wrap() -> None:
    one, other = (ErrorFeedback(inner=TopK(density=density)) for density in (0.1, 0.2))
    assert one != other
    assert str(one) != str(other)
    assert len({one, other, ErrorFeedback(inner=TopK(density=0.1))}) == 2
