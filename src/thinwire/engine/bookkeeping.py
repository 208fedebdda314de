"""The error ledger of an attached model: now and then a step is looked at, on all ranks, and what it lost is booked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.engine.agreeing import gathered
from thinwire.engine.groups import Group
from thinwire.engine.session import Session
from thinwire.engine.states import cut
from thinwire.plan.ledger import ErrorLedger, Quotas
from thinwire.plan.online import noise_over_ranks
from thinwire.plan.quality import MODEL

EVERY_STEPS = 50
QUOTAS = Quotas(decay=0.7, settle_steps=4)  # so a verdict rests on 200 steps


class Books:
    """Keeps a ledger: per tensor and for all of them, the noise and the compression error of the mean over the ranks.

    The error is taken from the residuals: what waits in them is what the mean lacks. Those of different ranks are taken
    for independent, so their mean has 1/P of their mean square. A compressor without a residual books no error.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.ledger = ErrorLedger(QUOTAS)

    def open_step(self) -> None:
        """Between two steps: say whether the next one is looked at. It depends on its number alone."""
        norms = self._session.norms
        norms.clear()
        norms.wanted = self._session.transport.world_size > 1 and self._session.step % EVERY_STEPS == EVERY_STEPS - 1

    def close_step(self, groups: Sequence[Group]) -> bool:
        """After a step: book it if it was looked at and counted, on all ranks alike; whether it was."""
        norms = self._session.norms
        if not (norms.wanted and norms.local_sq):
            return False
        mine = {"local": norms.local_sq, "residual": self._residuals_sq(groups), "mean": norms.mean_sq}
        ranks = gathered(self._session, mine)
        # The means are the same everywhere, but not every processor adds their squares up alike: one rank's count.
        self._book([one["local"] for one in ranks], [one["residual"] for one in ranks], ranks[0]["mean"])
        return True

    def forget_compression(self) -> None:
        """Another compressor is in use from now on."""
        for unit in self.ledger.units:
            self.ledger.changed(unit, "compression")

    def _residuals_sq(self, groups: Sequence[Group]) -> dict[str, float]:
        found = {}
        for unit in (unit for group in groups for unit in group.units):
            if "residual" in unit.compressor.layout():
                pieces = cut(self._session.states.of(unit), unit)
                found.update({name: float(one["residual"].dot(one["residual"])) for name, one in pieces.items()})
        return found

    def _book(
        self,
        locals_sq: Sequence[Mapping[str, float]],
        residuals_sq: Sequence[Mapping[str, float]],
        means_sq: Mapping[str, float],
    ) -> None:
        ranks = len(locals_sq)
        noise = {name: one.noise_sq / ranks for name, one in noise_over_ranks(locals_sq, means_sq).items()}
        lost = {name: sum(one[name] for one in residuals_sq) / ranks**2 for name in residuals_sq[0]}
        for name, mean_sq in means_sq.items():
            self.ledger.book(name, "noise", noise[name], mean_sq)
            if name in lost:
                self.ledger.book(name, "compression", lost[name], mean_sq)
        whole_sq = sum(means_sq.values())
        self.ledger.book(MODEL, "noise", sum(noise.values()), whole_sq)
        if lost:
            self.ledger.book(MODEL, "compression", sum(lost.values()), whole_sq)
