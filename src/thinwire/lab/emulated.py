"""The lab without namespaces, for machines that have no root or no iproute2."""

import socket
from collections.abc import Mapping
from typing import final

from thinwire.lab.base import EMULATE_VARIABLE, BaseLab
from thinwire.lab.errors import LabError
from thinwire.lab.running import Traffic

EMULATION_NOTICE = (
    "EMULATED: no network namespaces. All hosts share this machine's loopback, and only traffic through thinwire's own "
    "transport is throttled; anything else (plain DDP, the rendezvous, other sockets) runs at full speed. "
    "Bytes are not counted."
)


@final
class EmulatedLab(BaseLab):
    """Processes on loopback that are told, by THINWIRE_LAB_EMULATE=1 and THINWIRE_LAB_RATE, to throttle themselves.

    Only traffic through thinwire's throttled transport is slowed. Arguments: see `BaseLab`.
    """

    def address(self, host: int) -> str:
        """Return the loopback address, the same for every host."""
        self._checked(host)
        return "127.0.0.1"

    def counters(self) -> list[Traffic] | None:
        """Return None: processes on loopback have no interface of their own to count."""
        return None

    def link_down(self, host: int) -> None:
        """Refuse: there is no link."""
        raise LabError(f"host {host} is emulated and has no link to cut; use Lab (root and iproute2 needed)")

    def link_up(self, host: int) -> None:
        """Refuse: there is no link."""
        raise LabError(f"host {host} is emulated and has no link to restore; use Lab (root and iproute2 needed)")

    def _check_machine(self) -> None:
        """Any machine will do."""

    def _apply_rates(self, rates: Mapping[int, int | None]) -> None:
        """Nothing to reshape: commands started from now on see the new rate in their environment."""

    def _command_on(self, host: int, command: list[str]) -> list[str]:
        return command

    def _network_environment(self) -> dict[str, str]:
        return {"MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo", EMULATE_VARIABLE: "1"}

    def _end_stray_processes(self) -> None:
        """Nothing to do: without namespaces, only a command's own process group can be found, and that has ended."""

    def _remove_network(self) -> None:
        """Nothing to do: no network was built."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
