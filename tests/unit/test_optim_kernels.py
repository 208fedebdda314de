"""Ages and the AdamW step that knows them: C against the reference bit for bit, the reference against the formula."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.ages import MAX_AGE, adamw_table, aged_adamw, count_ages
from thinwire.kernels.native.library import LEVELS, library

try:
    native.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

RUNNABLE = LEVELS[: library().tw_best_level() + 1]
SPECIAL = [0.0, -0.0, 1e-40, -1e-45, 3e38, float("inf"), float("nan")]
LENGTHS = st.sampled_from([0, 1, 7, 15, 16, 17, 100, 1023, 1024, 1025, 2500])
SHARES = st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0])
TABLE = adamw_table(0.9, 0.999, MAX_AGE, False, torch.device("cpu"))
per_level = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=RUNNABLE)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use_level(request.param)
    yield request.param
    native.load()


def same_bits(got: Tensor, expected: Tensor) -> bool:
    nan = torch.isnan(expected) if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    got, expected = torch.where(nan, 0, got), torch.where(nan, 0, expected)
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def coordinates(numel: int, share: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights, gradients with special values, ages of which ``share`` is above 0, and two moments."""
    generator = torch.Generator().manual_seed(seed)
    came = torch.rand(numel, generator=generator) < share
    ages = (torch.randint(1, 256, (numel,), generator=generator) * came).to(torch.uint8)
    weight, grad, moment = torch.randn(3, numel, generator=generator).unbind()
    grad = torch.where(came, grad, 0.0)
    for index, value in enumerate(SPECIAL[: numel // 4]):
        grad[(37 * index + seed) % numel] = value
    return weight, grad, ages, moment, torch.rand(numel, generator=generator)


@per_level
@given(numel=LENGTHS, cap=st.sampled_from([1, 2, 200, 255]), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_counting_in_c_equals_the_reference(level: str, numel: int, cap: int, share: float, seed: int) -> None:
    _, mean, ages, _, _ = coordinates(numel, share, seed)
    since = (ages // 2).clamp_max(cap)
    results = []
    for kernels in (native, reference):
        mine, out = since.clone(), torch.full_like(since, 9)
        kernels.count_ages(mean, mine, out, cap)
        results.append((mine, out))
    assert all(same_bits(got, expected) for got, expected in zip(*results, strict=True))


@per_level
@given(numel=LENGTHS, share=SHARES, decay=st.sampled_from([1.0, 0.99]), seed=st.integers(0, 999))
def test_adamw_in_c_equals_the_reference(level: str, numel: int, share: float, decay: float, seed: int) -> None:
    arguments = coordinates(numel, share, seed)
    results = []
    for kernels in (native, reference):
        mine = [x.clone() for x in arguments]
        kernels.aged_adamw(*mine, TABLE, decay, 3e-3, 1.3, 1e-8)
        results.append(mine)
    assert all(same_bits(got, expected) for got, expected in zip(*results, strict=True))


def test_ages_count_steps_between_receipts_up_to_the_cap() -> None:
    since, ages = torch.zeros(2, 3, dtype=torch.uint8).unbind()
    seen = []
    for step in range(1, 301):
        came = torch.tensor([True, step % 7 == 0, step == 300])
        count_ages(torch.where(came, -0.5, 0.0), since, ages)
        seen.append(ages.tolist())
    assert [row[0] for row in seen] == [1] * 300
    assert {row[1] for row in seen} == {0, 7}
    assert seen[-1][2] == MAX_AGE
    assert since.tolist() == [0, 300 % 7, 0]


def test_a_step_is_the_documented_formula_in_fp64() -> None:
    weight, _, ages, moment, square = coordinates(500, 0.4, 5)
    grad = torch.where(ages > 0, torch.randn(500, generator=torch.Generator().manual_seed(0)), 0.0)
    steps, lr, (beta1, beta2) = 30, 2e-3, (0.9, 0.999)
    a = ages.double().clamp(1, MAX_AGE)
    m = beta1**a * moment.double() + (1 - beta1**a) * grad.double() / a
    v = beta2**a * square.double() + (1 - beta2**a) * grad.double().square() / a
    moved = lr * a * m / (1 - beta1**steps) / ((v / (1 - beta2**steps)).sqrt() + 1e-8)
    expected = [torch.where(ages > 0, new, old.double()) for new, old in ((m, moment), (v, square))]
    expected.insert(0, weight.double() * (1 - lr * 0.01) - torch.where(ages > 0, moved, 0.0))
    numbers = {"step_size": lr / (1 - beta1**steps), "correction": (1 - beta2**steps) ** -0.5, "epsilon": 1e-8}
    aged_adamw(weight, grad, ages, moment, square, TABLE, decay=1 - lr * 0.01, **numbers)
    for got, wanted in zip((weight, moment, square), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-7)


def test_higher_ages_count_as_the_highest_allowed() -> None:
    table = adamw_table(0.9, 0.99, 50, False, torch.device("cpu")).view(256, 5)
    assert torch.equal(table[50], table[51])
    assert torch.equal(table[50], table[255])
    assert table[49, 4] == 49


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ages": torch.zeros(8)}, "ages: got torch.float32"),
        ({"ages": torch.zeros(9, dtype=torch.uint8)}, "ages: got"),
        ({"moment": torch.zeros(8, dtype=torch.float64)}, "moment: got torch.float64"),
        ({"square": torch.zeros(16)[::2]}, "square: got"),
        ({"table": torch.zeros(5)}, "table: got"),
    ],
)
def test_what_a_kernel_would_misread_is_refused(change: dict[str, Tensor], complaint: str) -> None:
    weight, grad, moment, square = torch.zeros(4, 8).unbind()
    tensors = {"weight": weight, "grad": grad, "ages": torch.zeros(8, dtype=torch.uint8), "moment": moment}
    tensors |= {"square": square, "table": TABLE} | change
    with pytest.raises(ValueError, match=complaint):
        aged_adamw(**tensors, decay=1.0, step_size=0.1, correction=1.0, epsilon=1e-8)


def test_caps_that_do_not_fit_a_byte_are_refused() -> None:
    since, ages = torch.zeros(2, 3, dtype=torch.uint8).unbind()
    for cap in (0, 256):
        with pytest.raises(ValueError, match="cap: got"):
            count_ages(torch.zeros(3), since, ages, cap=cap)
    with pytest.raises(ValueError, match="max_age: got 201"):
        adamw_table(0.9, 0.99, 201, False, torch.device("cpu"))
