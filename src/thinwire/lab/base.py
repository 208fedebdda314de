"""What the real and the emulated lab share: starting one command per host, following it, ending it."""

import itertools
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from thinwire.lab.errors import LabError
from thinwire.lab.guard import Guard
from thinwire.lab.process import HostProcess, OnLine, end_processes
from thinwire.lab.rates import as_bits_per_s, format_rate, rates_per_host
from thinwire.lab.running import TERMINATE_GRACE_S, LabResult, Running, Traffic

FAILURE_GRACE_S = 5.0
EMULATE_VARIABLE = "THINWIRE_LAB_EMULATE"
_log = logging.getLogger(__name__)
_labs_of_this_process = itertools.count()
_Self = TypeVar("_Self", bound="BaseLab")


class BaseLab(ABC):
    """A cluster on one machine. Use it in a `with` block, or call `close`.

    Args:
        hosts: how many hosts.
        rate: the rate of every host's link, as text ("200mbit") or bits per second; None is unshaped.
        rates: one rate per host, instead of `rate`.
    """

    def __init__(
        self, hosts: int = 4, rate: str | int | None = None, rates: Sequence[str | int | None] | None = None
    ) -> None:
        self._rates = list(rates_per_host(hosts, rate, rates))
        self._check_machine()
        # The owner's pid lets `clean_leftovers` tell a leftover from a lab that is in use.
        self.name = f"tw{os.getpid()}-{next(_labs_of_this_process)}"
        self._active: list[Running] = []
        self._closed = False
        self._guard = Guard(self.name)

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return len(self._rates)

    @property
    def rates(self) -> tuple[int | None, ...]:
        """The rate of each host's link in bits per second; None is unshaped."""
        return tuple(self._rates)

    @abstractmethod
    def address(self, host: int) -> str:
        """Return the IP address at which the other hosts reach this one."""

    @abstractmethod
    def counters(self) -> list[Traffic] | None:
        """Return what each host has sent and received since the lab was built; None if that cannot be counted."""

    @abstractmethod
    def link_down(self, host: int) -> None:
        """Unplug a host from the network."""

    @abstractmethod
    def link_up(self, host: int) -> None:
        """Plug a host in again."""

    @abstractmethod
    def _check_machine(self) -> None:
        """Raise LabError if this machine cannot carry such a lab."""

    @abstractmethod
    def _apply_rates(self, rates: Mapping[int, int | None]) -> None: ...

    @abstractmethod
    def _command_on(self, host: int, command: list[str]) -> list[str]: ...

    @abstractmethod
    def _network_environment(self) -> dict[str, str]:
        """Return MASTER_PORT and GLOO_SOCKET_IFNAME for the next command, and what else is particular to this lab."""

    @abstractmethod
    def _end_stray_processes(self) -> None: ...

    @abstractmethod
    def _remove_network(self) -> None: ...

    def set_rate(self, host: int | None, rate: str | int | None) -> None:
        """Change the rate of one host's link, or of all with `host=None`, while commands run."""
        targets = range(self.hosts) if host is None else [self._checked(host)]
        rates = dict.fromkeys(targets, as_bits_per_s(rate))
        self._apply_rates(rates)
        for each, bits_per_s in rates.items():
            self._rates[each] = bits_per_s

    def start(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        failure_grace_s: float = FAILURE_GRACE_S,
    ) -> Running:
        """Start `cmd` on every host, with the rendezvous variables set, and return at once.

        Args:
            cmd: the command and its arguments (no shell).
            env: variables to set besides, and above, those of this process and of the lab.
            on_line: called as `on_line(host, line)` for each line of output, from one thread per host; default: logged.
            failure_grace_s: how long the others may go on after a host failed; lower: less time to report why.
        """
        if self._closed:
            raise LabError(f"lab {self.name} is closed; make a new one to run {cmd[0]!r}")
        _check_command(cmd)
        # A lab inside an emulated one would otherwise pass the emulation on.
        inherited = {name: value for name, value in os.environ.items() if name != EMULATE_VARIABLE}
        shared = inherited | self._network_environment()
        before = self.counters()
        processes: list[HostProcess] = []
        try:
            for host in range(self.hosts):
                variables = {**shared, **self._host_environment(host), **(env or {})}
                command = self._command_on(host, list(cmd))
                processes.append(HostProcess(host, command, variables, on_line or _log_line, self._guard))
        except BaseException:
            end_processes(processes, grace_s=0)
            raise
        running = Running(processes, self.counters, before, self._forget, failure_grace_s)
        self._active.append(running)
        return running

    def run(
        self,
        cmd: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
        failure_grace_s: float = FAILURE_GRACE_S,
    ) -> LabResult:
        """Run `cmd` on every host until it has ended on all; after `timeout_s` it is ended. Else as `start`."""
        running = self.start(cmd, env=env, on_line=on_line, failure_grace_s=failure_grace_s)
        try:
            return running.wait(timeout_s)
        except BaseException:
            running.terminate()
            raise

    def close(self) -> None:
        """End what still runs and remove the network. Harmless to repeat."""
        if self._closed:
            return
        for running in list(self._active):
            running.terminate(TERMINATE_GRACE_S)
        self._remove_network()
        self._guard.close()
        self._closed = True

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _host_environment(self, host: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.address(0),
            "RANK": str(host),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
            "PYTHONUNBUFFERED": "1",  # lines appear when they are written
            "THINWIRE_LAB_HOST": str(host),
            "THINWIRE_LAB_RATE": format_rate(self._rates[host]),
        }

    def _forget(self, running: Running) -> None:
        if running in self._active:
            self._active.remove(running)
        if not self._active:
            self._end_stray_processes()

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"got host {host}; this lab has hosts 0 to {self.hosts - 1}")
        return host


def _check_command(cmd: Sequence[str]) -> None:
    if not cmd:
        raise ValueError("got an empty command; give the program to run on each host and its arguments")
    if shutil.which(cmd[0]) is None:
        raise ValueError(f"command {cmd[0]!r} was not found or is not executable; check the spelling and PATH")


def _log_line(host: int, line: str) -> None:
    _log.info("host%d: %s", host, line)
