"""The error ledger of an attached model: now and then a step is measured, on all ranks, and what it lost is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.autopilot.expect import noise_over_ranks
from thinwire.autopilot.quality import MODEL
from thinwire.comm.objects import all_gather_object
from thinwire.exchange.channel import Channel
from thinwire.exchange.states import cut, residual_of
from thinwire.observe.report import StepReport
from thinwire.plan.ledger import ErrorLedger, Quotas

EVERY_STEPS = 50
QUOTAS = Quotas(decay=0.7, settle_steps=4)  # so a verdict rests on 200 steps


class ErrorStatistics:
    """Keeps a ledger: per tensor and for all of them, the noise and the compression error of the mean over the ranks.

    The error is taken from the residuals: what waits in them is what the mean lacks. Those of different ranks are taken
    for independent, so their mean has 1/P of their mean square. A compressor without a residual records no error.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._link = channel.members.link()
        self.ledger = ErrorLedger(QUOTAS)

    def open_step(self) -> None:
        """Between two steps: say whether the next one is measured. It depends on its number alone."""
        measured = self._channel.index % EVERY_STEPS == EVERY_STEPS - 1
        self._channel.measure(norms=self._link.world_size > 1 and measured)

    def close_step(self, report: StepReport) -> bool:
        """After a step: record it if it was measured and has committed, on all ranks alike; whether it was."""
        if not (self._channel.norms and report.local_sq):
            return False
        mine = {"local": report.local_sq, "residual": self._residuals_sq(), "mean": report.mean_sq}
        ranks = all_gather_object(self._link, mine)
        # The means are the same everywhere, but not every processor adds their squares up alike: one rank's count.
        self._record([one["local"] for one in ranks], [one["residual"] for one in ranks], ranks[0]["mean"])
        return True

    def forget_compression(self) -> None:
        """Another compressor is in use from here on."""
        for unit in self.ledger.units:
            self.ledger.changed(unit, "compression")

    def _residuals_sq(self) -> dict[str, float]:
        found = {}
        for unit, state in self._channel.states.items():
            for name, piece in cut(state, unit).items():
                residual = residual_of(piece, unit.compressor)
                if residual is not None:
                    found[name] = float(residual.dot(residual))
        return found

    def _record(
        self,
        locals_sq: Sequence[Mapping[str, float]],
        residuals_sq: Sequence[Mapping[str, float]],
        means_sq: Mapping[str, float],
    ) -> None:
        ranks = len(locals_sq)
        noise = {name: one.noise_sq / ranks for name, one in noise_over_ranks(locals_sq, means_sq).items()}
        lost = {name: sum(one[name] for one in residuals_sq) / ranks**2 for name in residuals_sq[0]}
        for name, mean_sq in means_sq.items():
            self.ledger.record(name, "noise", noise[name], mean_sq)
            if name in lost:
                self.ledger.record(name, "compression", lost[name], mean_sq)
        whole_sq = sum(means_sq.values())
        self.ledger.record(MODEL, "noise", sum(noise.values()), whole_sq)
        if lost:
            self.ledger.record(MODEL, "compression", sum(lost.values()), whole_sq)
