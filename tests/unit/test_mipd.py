"""MIPD-style sparsification: scores, budgets, ages, halves, the Laplace codebook, and forecasts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.laws import resumes_exactly
from contract.world import run_unit
from thinwire.comm import simulate
from thinwire.compressors.mipd import MIPD, halves
from thinwire.compressors.shared import significance
from thinwire.compressors.shared.laplace import codebook, laplace_format
from thinwire.compressors.shared.water_filling import layer_blocks
from thinwire.core import AllReduce, ConfigError, Step, TensorSpec, UnitSpec, make
from thinwire.fusion.prepare import prepare
from thinwire.wrappers import ErrorFeedback


def _unit(*sizes: int) -> UnitSpec:
    return UnitSpec(tuple(TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes)))


def _noise(unit: UnitSpec, *key: int) -> Tensor:
    return torch.randn(unit.numel, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def _sent_blocks(mean: Tensor, unit: UnitSpec) -> list[int]:
    return significance.as_blocks(mean, unit).any(dim=1).nonzero().squeeze(1).tolist()


def _scores_twin(name: str, x: Tensor, w: Tensor, unit: UnitSpec) -> list[float]:
    """Element by element."""
    scores = []
    for xs, ws in zip(x.double().split(unit.sizes), w.double().split(unit.sizes), strict=True):
        rms = math.sqrt(float(ws.square().mean()))
        for xb, wb in zip(xs.split(256), ws.split(256), strict=True):
            scores.append(
                {
                    "significance": float(((wb.abs() + 0.5 * rms) * xb.abs()).mean()),
                    "product": float((wb * xb).abs().mean()),
                    "fisher": math.sqrt(float(xb.square().mean())),
                    "magnitude": float(xb.abs().mean()),
                }[name]
            )
    return scores


@pytest.mark.parametrize("name", significance.SCORES)
@pytest.mark.parametrize("sizes", [(512, 256), (300, 5, 700)])
def test_scores(name: str, sizes: tuple[int, ...]) -> None:
    unit = _unit(*sizes)
    x, w = _noise(unit, 1), _noise(unit, 2)
    got = significance.score(name, significance.as_blocks(x, unit), w, unit)
    assert got.tolist() == pytest.approx(_scores_twin(name, x, w, unit), rel=1e-5)


def test_without_weights_the_magnitude_stands_in() -> None:
    unit = _unit(600)
    blocks = significance.as_blocks(_noise(unit), unit)
    assert torch.equal(
        significance.score("product", blocks, None, unit), significance.score("magnitude", blocks, None, unit)
    )
    assert MIPD().needs_weights
    assert prepare("mipd(score='product')").needs_weights
    assert not prepare("mipd(score='fisher')").needs_weights


def test_weights_decide_what_is_sent() -> None:
    unit = _unit(2560)
    weights = torch.ones(2560)
    weights[7 * 256 : 8 * 256] = 50.0
    step = Step(0, unit, weights=lambda: weights)
    (with_weights,) = simulate([MIPD(density=0.1, score="product").exchange(torch.ones(2560), MIPD().init(unit), step)])
    assert _sent_blocks(with_weights.mean, unit) == [7]
    (without,) = simulate([MIPD(density=0.1).exchange(torch.ones(2560), MIPD().init(unit), Step(0, unit))])
    assert _sent_blocks(without.mean, unit) == [0]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 300)), min_size=1, max_size=8), st.floats(0, 1))
def test_the_budget_is_spent_and_no_more(layers: list[tuple[float, int]], fraction: float) -> None:
    scores, blocks = (torch.tensor(one) for one in zip(*layers, strict=True))
    capacity = blocks - blocks // 7
    budget = int(fraction * int(capacity.sum()))
    counts = layer_blocks(scores.double(), blocks, budget, capacity)
    assert int(counts.sum()) == budget
    assert bool(((counts >= 0) & (counts <= capacity)).all())


def test_layers_share_by_the_root_of_their_scores_within_limits() -> None:
    blocks = torch.tensor([10_000] * 3)
    counts = layer_blocks(torch.tensor([1.0, 4.0, 9.0]), blocks, 600, blocks)
    assert counts.tolist() == [100, 200, 300]
    extreme = layer_blocks(torch.tensor([1e-12, 1.0, 1e-12]), blocks, 600, blocks)
    assert extreme.tolist() == [20, 560, 20], "0.1 of the density is left to everybody"
    greedy = layer_blocks(
        torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1000, 100, 1000]), 110, torch.tensor([1000, 100, 1000])
    )
    assert greedy[1] <= 26, "nobody gets more than about a quarter of itself"
    assert int(greedy.sum()) == 110


def test_every_rank_picks_the_blocks_of_the_common_score() -> None:
    unit, world = _unit(256 * 20), 3
    gradients = [torch.ones(unit.numel) for _ in range(world)]
    for rank, block in enumerate((3, 11, 15)):
        gradients[rank][256 * block : 256 * (block + 1)] = 100.0 * (1 + rank)
    done = run_unit(MIPD(density=0.1, refresh=1, values="fp32"), unit, [gradients])[0]
    assert _sent_blocks(done.results[0].mean, unit) == [11, 15]
    assert done.sent_bytes == [MIPD(density=0.1, refresh=1, values="fp32").wire_bytes(unit, world)] * world


def test_no_block_waits_for_ever() -> None:
    """Zero scores never win by themselves; with gradients in one block only, all the others are still sent in time."""
    unit, compressor = _unit(256 * 40), ErrorFeedback(inner=MIPD(density=0.1))
    gradient = torch.full((unit.numel,), 1e-9)
    gradient[:1024] = 1.0
    rounds = run_unit(compressor, unit, [[gradient]] * 120)
    oldest = max(int(done.results[0].state["age"].max()) for done in rounds)
    assert 40 <= oldest <= 40 + 20, "4 / density, and the time it takes to serve all that are overdue at once"


def test_the_price_is_the_average_over_steps() -> None:
    unit = _unit(256 * 30, 256 * 20, 100)
    for spec in (
        "mipd(density=0.1, refresh=4)",
        "mipd(density=0.1, half=True)",
        "mipd(density=0.1, values='laplace8', refresh=2)",
    ):
        compressor = make(spec)
        rounds = run_unit(compressor, unit, [[_noise(unit, i), _noise(unit, -i)] for i in range(8)])
        average = sum(done.sent_bytes[0] for done in rounds) / 8
        assert average == pytest.approx(compressor.wire_bytes(unit, 2), abs=2)
        assert not compressor.exact_bytes


def test_halves_take_turns() -> None:
    unit = _unit(5000, 3000, 2600, 700)
    sides = halves(unit)
    totals = [sum(size for size, side in zip(unit.sizes, sides, strict=True) if side == which) for which in (0, 1)]
    assert abs(totals[0] - totals[1]) <= 700
    rounds = run_unit(MIPD(density=0.5, half=True), unit, [[_noise(unit, i)] for i in range(4)])
    for index, done in enumerate(rounds):
        for part, side in zip(done.results[0].mean.split(unit.sizes), sides, strict=True):
            assert bool(part.any()) == (side == index % 2)
    assert {tuple(halves(_unit(300)))} | {
        tuple(halves(UnitSpec((TensorSpec(f"x{i}", (300,)),)))) for i in range(9)
    } == {
        (0,),
        (1,),
    }, "tensors that travel alone do not all have the same turn"


def test_scores_travel_every_few_steps_only() -> None:
    unit, compressor = _unit(256 * 8), MIPD(density=0.25, refresh=3, values="fp32")
    state = compressor.init(unit)
    asked = []
    for index in range(1, 8):
        exchange = compressor.exchange(_noise(unit, index), state, Step(index, unit))
        request, rounds = next(exchange), 0
        try:
            while True:
                assert isinstance(request, AllReduce)
                rounds += 1
                request = exchange.send(request.tensor)
        except StopIteration as stop:
            state = stop.value.state
        asked.append(rounds)
    assert asked == [2, 1, 2, 1, 1, 2, 1], "at first because nothing is known, then at steps 3 and 6"


@pytest.mark.parametrize(
    ("density", "values", "every"), [(0.2, "bf16", 1), (0.05, "bf16", 2), (0.05, "laplace4", 5), (0.001, "fp32", 8)]
)
def test_scores_never_rival_the_values(density: float, values: str, every: int) -> None:
    unit, world = _unit(256 * 2000), 4
    automatic, rare = (MIPD(density=density, values=values, refresh=refresh) for refresh in (0, 10**6))
    assert automatic.wire_bytes(unit, world) == MIPD(density=density, values=values, refresh=every).wire_bytes(
        unit, world
    )
    if every < 8:
        assert automatic.wire_bytes(unit, world) <= 1.14 * rare.wire_bytes(unit, world)
    assert automatic.exact_bytes == (every == 1)


class TestPredictive:
    """All ranks apply a forecast and send what differs from it."""

    UNIT = _unit(256 * 10, 300)
    COMPRESSOR = MIPD(density=0.2, compensation="predictive", values="fp32")

    def test_conserves_and_agrees(self) -> None:
        compressor = ErrorFeedback(inner=self.COMPRESSOR)
        gradients = [[_noise(self.UNIT, i, r) for r in range(3)] for i in range(30)]
        rounds = run_unit(compressor, self.UNIT, gradients)
        given = torch.stack([torch.stack(one).mean(dim=0) for one in gradients]).sum(dim=0)
        kept = torch.stack([result.state["residual"] for result in rounds[-1].results]).mean(dim=0)
        applied = torch.stack([done.results[0].mean for done in rounds]).sum(dim=0)
        assert torch.allclose(given - kept, applied, atol=1e-4)
        for done in rounds:
            for result in done.results[1:]:
                assert torch.equal(result.mean, done.results[0].mean)
                assert torch.equal(result.state["applied"], done.results[0].state["applied"])

    def test_resumes_exactly(self) -> None:
        resumes_exactly(ErrorFeedback(inner=self.COMPRESSOR))

    def test_does_not_blow_up(self) -> None:
        """Smoothing on top of a residual, counted twice, would grow without bound."""
        constant = [[torch.ones(self.UNIT.numel)] * 2] * 300
        rounds = run_unit(ErrorFeedback(inner=self.COMPRESSOR), self.UNIT, constant)
        late = torch.stack([done.results[0].mean for done in rounds[-50:]])
        assert float(late.mean()) == pytest.approx(1.0, abs=0.05), "what is applied on average is the gradient"
        assert float(rounds[-1].results[0].state["residual"].abs().max()) < 20

    def test_foresees_a_steady_gradient_where_nothing_is_sent(self) -> None:
        constant = [[torch.ones(self.UNIT.numel)]] * 60
        plain, predictive = (
            run_unit(ErrorFeedback(inner=MIPD(density=0.2, values="fp32", compensation=one)), self.UNIT, constant)
            for one in ("feedback", "predictive")
        )
        errors = [float((rounds[-1].results[0].mean - 1).square().mean()) for rounds in (plain, predictive)]
        assert errors[1] < errors[0] / 2
        assert not prepare(self.COMPRESSOR).sparse
        assert prepare(MIPD()).sparse


@pytest.mark.parametrize("magnitude_bits", [3, 7])
def test_codebook_is_that_of_the_law(magnitude_bits: int) -> None:
    edges, centroids = codebook(magnitude_bits)
    cells = 2**magnitude_bits
    assert edges == pytest.approx([-3 * math.log(1 - k / cells) for k in range(1, cells)])
    bounds = torch.tensor([0.0, *edges, 60.0], dtype=torch.float64)
    for low, high, centroid in zip(bounds[:-1].tolist(), bounds[1:].tolist(), centroids, strict=True):
        grid = torch.linspace(low, high, 20_001, dtype=torch.float64)
        law = torch.exp(-grid)
        mean = float(torch.trapezoid(grid * law, grid) / torch.trapezoid(law, grid))
        assert centroid == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.025), (8, 0.0002)])
def test_laplace_values_lose_little(bits: int, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(256 * 64, generator=generator) - 0.5
    x = -3e-5 * uniform.sign() * torch.log1p(-2 * uniform.abs())
    encoded = laplace_format(bits).encode(x.clone())
    assert encoded.codes.numel() == x.numel() * bits // 8
    decoded = torch.empty_like(x)
    laplace_format(bits).decode(encoded.codes, encoded.scales, 1.0, decoded, False)
    assert torch.equal(x - decoded, encoded.residual)
    assert float(encoded.residual.square().sum() / x.square().sum()) < error


def test_laplace_values_survive_extremes() -> None:
    for x in (torch.zeros(256), torch.full((256,), 3e38), torch.full((256,), 1e-40), torch.eye(16).flatten() * -1e30):
        encoded = laplace_format(4).encode(x.clone())
        assert bool(torch.isfinite(encoded.residual).all())
        assert float(encoded.residual.double().square().sum()) <= float(x.double().square().sum())


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("mipd(score='guess')", "expected one of significance, product, fisher, magnitude"),
        ("mipd(values='pot4')", "with a shared mask it is one of fp32, .*laplace4"),
        ("mipd(refresh=-1)", "refresh is -1"),
        ("mipd(smoothing=1.0)", "smoothing is 1.0"),
        ("mipd(compensation='both')", "expected 'feedback' or 'predictive'"),
        ("mipd(density=0)", "density is 0"),
    ],
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)
