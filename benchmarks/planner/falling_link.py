"""A link that falls in the middle of a run: does ``auto`` notice, and do all ranks change together?

``python -m benchmarks.planner.falling_link --out runs/falling`` trains the demo's GPT with ``compress="auto"`` on 4 hosts at
1 Gbit/s, makes it 50 Mbit/s after 40 steps, and goes on until 30 steps after the latest plan, or for 230. The first plan
comes after eight to eighteen steps, and the fourteen after it are a trial against dense as it was before: a link that falls
during the trial is another experiment (``--falls-after``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from thinwire.demo.settings import Contestant, Workload
from thinwire.lab import Lab, Running, parse_rate
from thinwire.observe.events import Event, parse_event, read_events

FALLS_AFTER, GIVES_UP_AFTER, SETTLED_AFTER = 40, 200, 30  # steps
POLL_S = 0.05


@dataclass(frozen=True)
class Story:
    """What happened.

    Args:
        before: the plan when the link fell; ``after`` the latest plan after that, None if there was none.
        noticed_after_steps: from the fall to the first new plan; ``settled_after_steps`` to the latest.
        plans: all of them, with the steps from the fall (below zero: before it).
        ranks_agree: every rank reports the same plans from the same steps on.
        predicted_s: by the latest plan.
        step_s: medians: before the fall, between it and the first new plan, under the latest (without its first two steps).
    """

    before: str | None
    after: str | None
    noticed_after_steps: int | None
    settled_after_steps: int | None
    plans: list[tuple[int, str]]
    ranks_agree: bool
    predicted_s: float | None
    step_s: dict[str, float | None]


def story_of(ranks: Sequence[Sequence[Event]], fell_at: int) -> Story:
    """The story in the events of all ranks; rank 0's come first.

    Args:
        fell_at: the first step at the new rate.
    """
    plans = [event for event in ranks[0] if event["kind"] == "plan"]
    earlier = [plan for plan in plans if plan["step"] <= fell_at]
    later = [plan for plan in plans if plan["step"] > fell_at]
    first, last = (later[0], later[-1]) if later else (None, None)
    return Story(
        before=_setting(earlier[-1]) if earlier else None,
        after=_setting(last) if last else None,
        noticed_after_steps=first["step"] - fell_at if first else None,
        settled_after_steps=last["step"] - fell_at if last else None,
        plans=[(plan["step"] - fell_at, _setting(plan)) for plan in plans],
        ranks_agree=len({_course(events) for events in ranks}) == 1,
        predicted_s=last["step_s"] if last else None,
        step_s={
            "before": _median_s(ranks[0], earlier[-1]["step"] + 2 if earlier else 2, fell_at),
            "between": _median_s(ranks[0], fell_at, first["step"] if first else None),
            "after": _median_s(ranks[0], last["step"] + 2, None) if last else None,
        },
    )


def _course(events: Sequence[Event]) -> tuple[tuple[int, str], ...]:
    return tuple((event["step"], _setting(event)) for event in events if event["kind"] == "plan")


def _setting(plan: Event) -> str:
    return f"{plan['compress']}, fuse={plan['fuse']}"


def _median_s(events: Sequence[Event], first: int, end: int | None) -> float | None:
    """Of the steps from ``first`` up to ``end``."""
    chosen = [
        e["step_s"] for e in events if e["kind"] == "step" and first <= e["step"] and (end is None or e["step"] < end)
    ]
    return statistics.median(chosen) if chosen else None


class Follower:
    """Reads what rank 0 says while it trains."""

    def __init__(self) -> None:
        self.steps, self.plan_steps, self.said = 0, [0], [""]

    def __call__(self, host: int, line: str) -> None:
        """Take in one line of a host."""
        event = parse_event(line) if host == 0 else None
        if event is None:
            self.said.append(f"[host {host}] {line}")
        elif event["kind"] == "step":
            self.steps = event["step"] + 1
        elif event["kind"] == "plan":
            self.plan_steps.append(event["step"])

    def ends(self, fell_at: int) -> bool:
        """Whether there is nothing more to see."""
        later = [step for step in self.plan_steps if step > fell_at]
        return bool(later) and self.steps >= later[-1] + SETTLED_AFTER


def _follow(running: Running, follower: Follower, lab: Lab, to: str, falls_after: int) -> int:
    """Let the link fall, and wait until all is said; the first step at the new rate."""
    fell_at: int | None = None
    while None in running.poll():
        if fell_at is None and follower.steps >= falls_after:
            lab.set_rate(None, to)
            fell_at = follower.steps + 1  # the step under way had both rates
        if fell_at is not None and follower.ends(fell_at):
            break
        time.sleep(POLL_S)
    else:
        if any(running.poll()):
            raise RuntimeError("a worker failed; they last said:\n" + "\n".join(follower.said[-15:]))
    running.terminate()
    assert fell_at is not None, "the run ended before the link fell"
    return fell_at


def run(args: argparse.Namespace) -> Story:
    """Train on the lab; events are kept in ``args.out``."""
    shutil.rmtree(args.out / "auto", ignore_errors=True)
    steps = args.falls_after + GIVES_UP_AFTER + SETTLED_AFTER
    contestant = Contestant(
        name="auto",
        label="thinwire auto",
        mode="thinwire",
        workload=Workload(model=args.model, batch=args.batch, steps=steps, evaluations=1),
        network=f"{args.hosts} hosts, {args.rate} falling to {args.to}",
        bits_per_s=parse_rate(args.to),  # time-outs are for the slower rate
    )
    settings = (args.out / "auto" / "settings.json").resolve()
    contestant.save(settings)
    follower = Follower()
    with Lab(args.hosts, args.rate) as lab:
        running = lab.start([sys.executable, "-m", "thinwire.demo.train", str(settings)], on_line=follower)
        fell_at = _follow(running, follower, lab, args.to, args.falls_after)
    files = [settings.parent / f"rank{rank}.jsonl" for rank in range(args.hosts)]
    # Ranks are ended at slightly different points: what not all have written is no disagreement.
    return story_of(cut_to_common([list(read_events(file)) for file in files]), fell_at)


def cut_to_common(ranks: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Only what lies before the last step that every rank has reported."""
    last = min(max((event["step"] for event in events if event["kind"] == "step"), default=0) for events in ranks)
    return [[event for event in events if event.get("step", 0) <= last] for events in ranks]


def main() -> None:
    """Run, print the story and keep it in ``story.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/falling-link"))
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch", type=int, default=7)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--to", default="50mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--falls-after", type=int, default=FALLS_AFTER, help="steps")
    args = parser.parse_args()
    story = asdict(run(args))
    text = json.dumps(story, indent=1)
    (args.out / "story.json").write_text(text + "\n", encoding="utf-8")
    Console().print(text, markup=False, highlight=False)


if __name__ == "__main__":
    main()
