"""What every compressor must do, whichever it is. Each law takes a compressor and asserts; ``LAWS`` holds them all."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from contract.menagerie import BY_NAME, MENAGERIE, Specimen
from contract.world import Round, World, run_unit
from thinwire import kernels
from thinwire.core import AllGather, Compressor, Role, State, Step, UnitSpec, make
from thinwire.wrappers.routing import Route

WORLD_SIZES = (1, 2, 3, 4)
STEPS = 3
Law = Callable[[Compressor], None]


@lru_cache(maxsize=len(MENAGERIE) * len(WORLD_SIZES))
def history(compressor: Compressor, name: str, world_size: int) -> tuple[Round, ...]:
    """A few steps of one specimen; kept while the laws of one compressor are checked."""
    gradients = [[BY_NAME[name].gradient(rank, step) for rank in range(world_size)] for step in range(STEPS)]
    return tuple(run_unit(compressor, BY_NAME[name].unit, gradients))


def _rounds(compressor: Compressor) -> Iterator[tuple[Specimen, int, Round]]:
    # A router hands on to what it wraps, which is examined by itself: one world size shows that.
    world_sizes = (3,) if isinstance(compressor, Route) else WORLD_SIZES
    for specimen in MENAGERIE:
        for world_size in world_sizes:
            for done in history(compressor, specimen.name, world_size):
                yield specimen, world_size, done


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """Bytes, because -0.0 == 0.0 and NaN != NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def agreement(compressor: Compressor) -> None:
    """``mean`` is flat fp32, finite, and bit-identical on all ranks; so is state that is declared replicated."""
    replicated = [key for key, layout in compressor.layout().items() if layout.role is Role.REPLICATED]
    for specimen, world_size, done in _rounds(compressor):
        where = f"{specimen.name}, {world_size} ranks"
        first = done.results[0]
        assert first.mean.dtype == torch.float32, where
        assert first.mean.shape == (specimen.unit.numel,), where
        assert torch.isfinite(first.mean).all(), where
        for result in done.results[1:]:
            assert _same_bits(result.mean, first.mean), where
            assert all(_same_bits(result.state[key], first.state[key]) for key in replicated), where


def conservation(compressor: Compressor) -> None:
    """The mean over ranks of what went in minus what was kept is the mean that came out, for every tensor."""
    keys = [key for key, layout in compressor.layout().items() if layout.role is Role.RESIDUAL]
    for specimen, world_size, done in _rounds(compressor):
        given, kept = (torch.stack([part(done, rank, keys) for rank in range(world_size)]) for part in (_given, _kept))
        off = (given - kept).mean(dim=0) - done.results[0].mean.double()
        magnitudes = given.abs() + kept.abs()
        sizes = specimen.unit.sizes
        for error, magnitude in zip(off.split(sizes), magnitudes.amax(dim=0).split(sizes), strict=True):
            bound = 1e-5 * world_size * magnitude.amax().item() + 1e-38 if error.numel() else 0.0
            worst = error.abs().max().item() if error.numel() else 0.0
            assert worst <= bound, f"{specimen.name}, {world_size} ranks: off by {worst:g}, allowed {bound:g}"


def _given(done: Round, rank: int, keys: list[str]) -> Tensor:
    """What the rank had to send: its gradient (or the velocity that replaces it) and what it kept from before."""
    given = done.results[rank].state.get("velocity", done.inputs[rank]).double()
    return sum((done.before_copies[rank][key].double() for key in keys), given)


def _kept(done: Round, rank: int, keys: list[str]) -> Tensor:
    result = done.results[rank]
    kept = sum((result.state[key].double() for key in keys), torch.zeros_like(result.mean).double())
    return kept if result.residual is None else kept + result.residual.double()


def bytes_as_declared(compressor: Compressor) -> None:
    """``wire_bytes`` is what is really sent; where it is an estimate, nothing is sent to nobody."""
    for specimen, world_size, done in _rounds(compressor):
        expected = compressor.wire_bytes(specimen.unit, world_size)
        if compressor.exact_bytes:
            assert done.sent_bytes == [expected] * world_size, f"{specimen.name}, {world_size} ranks"
        if world_size == 1:
            assert (done.sent_bytes, expected) == ([0], 0), specimen.name


def rounds_as_declared(compressor: Compressor) -> None:
    """Where ``rounds`` is said, there are no more, among all ranks, of sizes that do not depend on what is sent."""
    if compressor.rounds is None:
        return
    for specimen, world_size, done in _rounds(compressor):
        where = f"{specimen.name}, {world_size} ranks"
        assert len(done.asked) <= compressor.rounds, where
        for request in (one for asked in done.asked for one in asked):
            assert request.partition is None, where
            assert not (isinstance(request, AllGather) and request.varying), where


def not_finite_aborts(compressor: Compressor) -> None:
    """A NaN or an infinity in any tensor is told before the first round, and nothing finite is.

    Who drives an exchange checks the gradient first, unless the compressor promises to: then it must do so itself.
    """
    for specimen in MENAGERIE:
        assert not _told(compressor, specimen, specimen.gradient(1, STEPS)), f"{specimen.name} is finite"
    specimen = BY_NAME["unlike"]
    offsets, sizes = specimen.unit.offsets, specimen.unit.sizes
    for first, size in ((first, size) for first, size in zip(offsets, sizes, strict=False) if size):
        for poison in (torch.nan, torch.inf, -torch.inf):
            gradient = specimen.gradient(1, STEPS)
            gradient[first + size // 2] = poison
            assert _told(compressor, specimen, gradient), f"{poison} in the tensor at {first}"


def _told(compressor: Compressor, specimen: Specimen, gradient: Tensor) -> bool:
    """Whether the step is to be skipped, as far as rank 1 of two knows when it has asked for its first round."""
    if not compressor.checks_finite and not kernels.all_finite(gradient):
        return True
    told: list[bool] = []
    step = Step(STEPS, specimen.unit, 1, 2, on_not_finite=lambda: told.append(True))
    state = history(compressor, specimen.name, 2)[-1].results[1].state
    exchange = compressor.exchange(gradient, state, step)
    next(exchange, None)
    exchange.close()
    return bool(told)


def contraction(compressor: Compressor) -> None:
    """With a compressor that asks for error feedback, the ranks together never keep more than they were given."""
    if not compressor.feedback:
        return
    for specimen, world_size, done in _rounds(compressor):
        residuals = [result.residual for result in done.results if result.residual is not None]
        assert len(residuals) == world_size, f"{specimen.name}: it asks for feedback but gives no residual"
        kept, given = (sum(_energy(part) for part in parts) for parts in (residuals, done.inputs))
        assert kept <= given * (1 + 1e-5) + 1e-70, f"{specimen.name}, {world_size} ranks: kept {kept:g} of {given:g}"


def _energy(tensor: Tensor) -> float:
    return tensor.double().square().sum().item()


def old_state_survives(compressor: Compressor) -> None:
    """An exchange leaves the state it was given as it was: a step that is skipped goes back to it."""
    for specimen, _, done in _rounds(compressor):
        for state, copy in zip(done.before, done.before_copies, strict=True):
            for key, value in copy.items():
                assert _same_bits(state[key], value), f"{specimen.name}: {key} was overwritten"


def mean_is_nobody_elses(compressor: Compressor) -> None:
    """``mean`` becomes the gradient, which users scale and clip in place: no state and no residual may change with it."""
    for specimen, world_size, done in _rounds(compressor):
        for result in done.results:
            mean = result.mean.untyped_storage().data_ptr()
            others = [*result.state.values(), *([] if result.residual is None else [result.residual])]
            shared = [other for other in others if other.numel() and other.untyped_storage().data_ptr() == mean]
            assert not shared, f"{specimen.name}, {world_size} ranks"


def state_layout(compressor: Compressor) -> None:
    """``layout`` covers exactly the state, and the state of a unit is the joined state of its tensors."""
    layout = compressor.layout()
    residuals = [one for one in layout.values() if one.role is Role.RESIDUAL]
    assert all(one.elementwise for one in residuals), "a residual is a gradient that waits"
    for specimen in MENAGERIE:
        unit = specimen.unit
        initial, later = compressor.init(unit), history(compressor, specimen.name, 2)[-1].results[0].state
        assert set(initial) == set(later) == set(layout), specimen.name
        singles = [compressor.init(UnitSpec((tensor,))) for tensor in unit.tensors]
        for key, one in layout.items():
            assert _same_bits(initial[key], torch.cat([single[key] for single in singles])), (specimen.name, key)
            elems = sum(one.numel(tensor) for tensor in unit.tensors)
            assert initial[key].shape == later[key].shape == (elems,), (specimen.name, key)


def text_form(compressor: Compressor) -> None:
    """``str`` prints what ``make`` reads, and equal configurations are equal and hash alike."""
    again = make(str(compressor))
    assert again == compressor
    assert hash(again) == hash(compressor)
    assert str(again) == str(compressor)


def global_rng_untouched(compressor: Compressor) -> None:
    """The user's own random numbers do not depend on compression."""
    specimen = BY_NAME["unlike"]
    gradients = [[specimen.gradient(rank, 0) for rank in range(2)]]
    before = _global_rngs()
    run_unit(compressor, specimen.unit, gradients)
    assert _global_rngs() == before


def _global_rngs() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state["pos"], numpy_state["key"].tolist()


def deterministic(compressor: Compressor) -> None:
    """The same input gives the same bits again: random choices depend on seed, step and name only."""
    specimen = BY_NAME["unlike"]
    gradients = [[specimen.gradient(rank, step) for rank in range(2)] for step in range(STEPS)]
    first, second = (run_unit(compressor, specimen.unit, gradients) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(_same_bits(a.mean, b.mean) for a, b in zip(one.results, other.results, strict=True))


def resumes_exactly(compressor: Compressor) -> None:
    """Save, load, go on equals going on, bit for bit, also when the tensors were regrouped in between."""
    for name in ("unlike", "conv"):
        for regroup in (False, True):
            _resume_one(compressor, BY_NAME[name], regroup)


def _resume_one(compressor: Compressor, specimen: Specimen, regroup: bool) -> None:
    tensors, world_size = specimen.unit.tensors, 3
    straight, resumed = (World(tensors, compressor, world_size) for _ in range(2))
    together = straight.group(tensors)
    later = [straight.group([tensor]) for tensor in tensors] if regroup else [together]
    for step in range(4):
        gradients = [_by_name(specimen, rank, step) for rank in range(world_size)]
        groups = [together] if step < 2 else later
        expected, got = straight.step(groups, gradients), resumed.step(groups, gradients)
        assert all(_same_bits(got[r][n], expected[r][n]) for r in range(world_size) for n in expected[r]), (
            f"{specimen.name}, step {step}"
        )
        if step == 1:
            resumed = _restarted(resumed, specimen)
    for one, other in zip(straight.at_rest, resumed.at_rest, strict=True):
        _same_state(one, other)


def _by_name(specimen: Specimen, rank: int, step: int) -> dict[str, Tensor]:
    parts = specimen.gradient(rank, step).split(specimen.unit.sizes)
    return {tensor.fqn: part for tensor, part in zip(specimen.unit.tensors, parts, strict=True)}


def _restarted(world: World, specimen: Specimen) -> World:
    """A new world with the state of the old one, through a file that holds no code."""
    fresh = World(specimen.unit.tensors, world.compressor, world.world_size)
    fresh.index = world.index
    for rank, old in enumerate(world.at_rest):
        file = io.BytesIO()
        torch.save(old, file)
        file.seek(0)
        fresh.load(rank, torch.load(file, weights_only=True))
    return fresh


def _same_state(one: dict[str, State], other: dict[str, State]) -> None:
    assert one.keys() == other.keys()
    for name, state in one.items():
        assert state.keys() == other[name].keys()
        assert all(_same_bits(value, other[name][key]) for key, value in state.items()), name


LAWS: tuple[Law, ...] = (
    agreement,
    conservation,
    bytes_as_declared,
    rounds_as_declared,
    not_finite_aborts,
    contraction,
    old_state_survives,
    mean_is_nobody_elses,
    state_layout,
    text_form,
    global_rng_untouched,
    deterministic,
    resumes_exactly,
)
