"""The demo's model, data and settings: the same for every contestant, different for every rank."""

from pathlib import Path

import pytest
import torch

from thinwire.demo.data import batch_starts, evaluation_starts, load_corpus, source_files, windows_at
from thinwire.demo.model import SIZES, build_model
from thinwire.demo.settings import Contestant, Workload, make_workload
from thinwire.demo.train import learning_rate_at


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.9), ("small", 5.0), ("medium", 20.0)])
def test_sizes_are_as_advertised(size: str, millions: float) -> None:
    parameters = sum(parameter.numel() for parameter in build_model(size, 128, 0).parameters())
    assert parameters / 1e6 == pytest.approx(millions, rel=0.05)


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = (build_model("tiny", 16, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_an_unknown_size_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(SIZES)):
        build_model("huge", 16, 0)


def test_a_byte_sees_none_that_follow_it() -> None:
    model = build_model("tiny", 8, 0)
    inputs = torch.arange(8)[None]
    changed = inputs.clone()
    changed[0, -1] = 200
    targets = inputs.clone()
    targets[0, -1] = -100  # cross_entropy passes over this position: the only one that may differ
    with torch.no_grad():
        assert float(model(inputs, targets)) == float(model(changed, targets))
        assert float(model(inputs, inputs)) != float(model(changed, inputs))


def test_the_model_learns_a_repeating_text() -> None:
    model = build_model("tiny", 16, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = windows_at(torch.arange(64, dtype=torch.uint8) % 4, torch.arange(0, 40, 8), 16)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def write_sources(root: Path, files: int) -> None:
    for index in range(files):
        (root / f"module{index:02}.py").write_bytes(bytes([index]) * 100)
    (root / "test").mkdir()
    (root / "test" / "skipped.py").write_bytes(b"t" * 100)
    (root / "notes.txt").write_bytes(b"n" * 100)


def test_no_file_is_in_both_splits_and_others_are_left_out(tmp_path: Path) -> None:
    write_sources(tmp_path, 41)
    corpus = load_corpus(tmp_path, min_bytes=1)
    assert set(corpus.evaluation.tolist()) == {0, 20, 40}
    assert set(corpus.train.tolist()) == set(range(41)) - {0, 20, 40}
    assert [path.name for path in source_files(tmp_path)][:2] == ["module00.py", "module01.py"]


def test_too_little_text_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="standard library is installed"):
        load_corpus(tmp_path)


def test_this_python_has_enough_text() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.evaluation) > 10_000


def test_an_epoch_shows_each_window_once_to_one_rank() -> None:
    seen = [
        int(start)
        for step in range(10)
        for rank in range(4)
        for start in batch_starts(1601, 16, step, rank, 4, 2, seed=5)
    ]
    assert len(seen) == len(set(seen)) == 80
    assert all(start % 16 == 0 and start + 16 < 1601 for start in seen)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, first_step: int) -> list[int]:
        return [int(start) for step in range(12) for start in batch_starts(1601, 16, first_step + step, 0, 4, 2, seed)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 12)  # 100 windows, 8 per step: step 12 starts the next epoch


def test_a_text_shorter_than_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than one step"):
        batch_starts(100, 16, 0, 0, 4, 2, 0)


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = windows_at(torch.arange(100, dtype=torch.uint8), torch.tensor([10, 50]), 4)
    assert inputs.tolist() == [[10, 11, 12, 13], [50, 51, 52, 53]]
    assert targets.tolist() == [[11, 12, 13, 14], [51, 52, 53, 54]]


def test_ranks_share_the_evaluation_windows_out() -> None:
    shares = [evaluation_starts(1000, 16, 10, rank, 4).tolist() for rank in range(4)]
    together = sorted(start for share in shares for start in share)
    assert together == sorted(evaluation_starts(1000, 16, 10, 0, 1).tolist())
    assert together[-1] + 16 < 1000


@pytest.mark.parametrize(("steps", "evaluations"), [(50, 5), (8, 1), (7, 3), (3, 9)])
def test_the_last_step_is_always_evaluated(steps: int, evaluations: int) -> None:
    workload = Workload(steps=steps, evaluations=evaluations)
    evaluated = [step for step in range(steps) if workload.evaluates_after(step)]
    assert evaluated[-1] == steps - 1
    assert len(evaluated) == min(steps, evaluations)


def test_the_learning_rate_warms_up_and_stays() -> None:
    workload = Workload(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(step, workload) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_quick_is_shorter_and_explicit_choices_win() -> None:
    assert (
        make_workload(quick=True, model="small", seed=0).steps < make_workload(quick=False, model="small", seed=0).steps
    )
    assert make_workload(quick=True, model="small", seed=0, steps=99).steps == 99


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        Workload(steps=0)
    with pytest.raises(ValueError, match="expected one of floor, ddp, ddp_fp16, ddp_powersgd, thinwire"):
        Contestant(name="x", label="x", mode="magic", workload=Workload())  # type: ignore[arg-type]


def test_settings_survive_their_file(tmp_path: Path) -> None:
    contestant = Contestant(name="x", label="y", mode="ddp", workload=Workload(steps=3), bits_per_s=10, emulated=True)
    contestant.save(tmp_path / "deep" / "settings.json")
    assert Contestant.load(tmp_path / "deep" / "settings.json") == contestant
