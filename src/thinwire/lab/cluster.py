"""The lab on real network namespaces."""

import itertools
from collections.abc import Mapping, Sequence
from typing import final

from thinwire.lab import network
from thinwire.lab.available import lab_available
from thinwire.lab.base import BaseLab
from thinwire.lab.errors import LabError
from thinwire.lab.reaper import remove_lab
from thinwire.lab.running import Traffic

_FIRST_PORT = 29500


@final
class Lab(BaseLab):
    """Hosts in network namespaces, with links that the kernel shapes. Arguments: see `BaseLab`."""

    def __init__(
        self, hosts: int = 4, rate: str | int | None = None, rates: Sequence[str | int | None] | None = None
    ) -> None:
        super().__init__(hosts, rate, rates)
        # A fresh port per command: two may run at once, and a port may linger after its listener was killed.
        self._ports = itertools.count(_FIRST_PORT)
        try:
            self._network = network.Network(self.name, self.rates)
        except BaseException:
            remove_lab(self.name)
            self._guard.close()
            raise

    def address(self, host: int) -> str:
        """Return the host's address inside the lab; nothing outside the lab can reach it."""
        return network.address(self._checked(host))

    def counters(self) -> list[Traffic]:
        """Return the interface counters: every byte on the wire, with headers and retransmissions."""
        return self._network.counters()

    def link_down(self, host: int) -> None:
        """Unplug the host's cable: its packets are lost, its connections notice only by time-out."""
        self._network.set_link(self._checked(host), "down")

    def link_up(self, host: int) -> None:
        """Plug the cable in again."""
        self._network.set_link(self._checked(host), "up")

    def _check_machine(self) -> None:
        available, reason = lab_available()
        if not available:
            raise LabError(reason)

    def _apply_rates(self, rates: Mapping[int, int | None]) -> None:
        self._network.shape(rates)

    def _command_on(self, host: int, command: list[str]) -> list[str]:
        return self._network.command_on(host, command)

    def _network_environment(self) -> dict[str, str]:
        return {"MASTER_PORT": str(next(self._ports)), "GLOO_SOCKET_IFNAME": network.HOST_INTERFACE}

    def _end_stray_processes(self) -> None:
        self._network.end_processes()

    def _remove_network(self) -> None:
        remove_lab(self.name)
