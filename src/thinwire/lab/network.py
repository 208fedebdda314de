"""The wires of a lab: one namespace per host, one for the switch, `ip` and `tc` in as few calls as possible.

    host 0: eth0 ----- port0 :switch: port1 ----- eth0 :host 1

The bridge lives in a namespace of its own, so nothing touches the machine's real network. The host's end shapes what
the host sends, the switch's port what it receives.
"""

import json
import logging
import subprocess
from collections.abc import Iterable, Mapping
from typing import final

from thinwire.lab import reaper
from thinwire.lab.errors import LabError
from thinwire.lab.running import Traffic

HOST_INTERFACE = "eth0"
SHAPING = "burst 256kb latency 100ms"
_log = logging.getLogger(__name__)
# Take the host's name and see the lab's own /etc/hosts, because torchrun's rendezvous and gloo look their own
# machine up by name. `exec` all the way: the process the lab waits for is the command itself.
_BECOME_HOST = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def address(host: int) -> str:
    """Return the IPv4 address of a host inside every lab."""
    return f"10.77.0.{host + 1}"


def hostname(host: int) -> str:
    """Return the name by which the hosts of a lab know this one."""
    return f"host{host}"


@final
class Network:
    """The namespaces, links and shaping of one lab."""

    def __init__(self, lab: str, rates: tuple[int | None, ...]) -> None:
        self._lab = lab
        self._rates: list[int | None] = [None] * len(rates)
        self._create_namespaces()
        self._write_hosts_file()
        self._join_hosts()
        self.shape(dict(enumerate(rates)))

    def shape(self, rates: Mapping[int, int | None]) -> None:
        """Set the rate of these hosts' links, in both directions; None lifts the limit."""
        changed = {host: rate for host, rate in rates.items() if rate != self._rates[host]}
        _call("tc", self._switch, (_qdisc(_port(host), rate) for host, rate in changed.items()))
        for host, rate in changed.items():
            _call("tc", self._namespace(host), [_qdisc(HOST_INTERFACE, rate)])
            self._rates[host] = rate

    def set_link(self, host: int, state: str) -> None:
        """Plug ("up") or unplug ("down") the cable at the switch; the host keeps its address and its routes."""
        _call("ip", self._switch, [f"link set {_port(host)} {state}"])

    def counters(self) -> list[Traffic]:
        """Read what each host has sent and received so far; one call for all, at the switch's ports."""
        command = ["ip", "-n", self._switch, "-s", "-j", "link", "show", "type", "veth"]
        statistics = {link["ifname"]: link["stats64"] for link in json.loads(_output(command))}
        ports = (statistics[_port(host)] for host in range(len(self._rates)))
        return [Traffic(sent_bytes=port["rx"]["bytes"], received_bytes=port["tx"]["bytes"]) for port in ports]

    def command_on(self, host: int, command: list[str]) -> list[str]:
        """Return the command that runs `command` on this host."""
        enter = ["ip", "netns", "exec", self._namespace(host), "unshare", "--uts"]
        become_host = ["sh", "-ec", _BECOME_HOST, "sh", hostname(host), str(reaper.hosts_file(self._lab))]
        return [*enter, *become_host, *command]

    def end_processes(self) -> None:
        """Kill everything that still runs on any host, whichever session it moved to."""
        reaper.kill_inside(self._namespace(host) for host in range(len(self._rates)))

    @property
    def _switch(self) -> str:
        return f"{self._lab}-sw"

    def _namespace(self, host: int) -> str:
        return f"{self._lab}-h{host}"

    def _create_namespaces(self) -> None:
        names = [self._switch, *map(self._namespace, range(len(self._rates)))]
        _call("ip", None, (f"netns add {name}" for name in names))

    def _write_hosts_file(self) -> None:
        reaper.STATE_DIR.mkdir(exist_ok=True)
        lines = [f"{address(host)} {hostname(host)}" for host in range(len(self._rates))]
        # c10d's store looks its peers up as IPv4-mapped addresses and warns, after asking DNS in vain, if they have no
        # name. A name of its own: `hostN` itself must not resolve to an IPv6 address.
        lines += [f"::ffff:{address(host)} {hostname(host)}.mapped" for host in range(len(self._rates))]
        reaper.hosts_file(self._lab).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _join_hosts(self) -> None:
        # addrgenmode none: no IPv6 chatter in the byte counters, and gloo cannot pick a link-local address.
        switch = ["link add bridge type bridge", "link set bridge addrgenmode none up"]
        for host in range(len(self._rates)):
            end = f"peer name {HOST_INTERFACE} netns {self._namespace(host)}"
            switch.append(f"link add {_port(host)} type veth {end}")
            switch.append(f"link set {_port(host)} master bridge addrgenmode none up")
        _call("ip", self._switch, switch)
        for host in range(len(self._rates)):
            link = f"link set {HOST_INTERFACE} addrgenmode none up"
            own_address = f"address add {address(host)}/24 dev {HOST_INTERFACE}"
            _call("ip", self._namespace(host), ["link set lo up", link, own_address])


def _port(host: int) -> str:
    return f"port{host}"


def _qdisc(interface: str, rate: int | None) -> str:
    if rate is None:
        return f"qdisc delete dev {interface} root"
    return f"qdisc replace dev {interface} root tbf rate {rate}bit {SHAPING}"


def _call(tool: str, namespace: str | None, lines: Iterable[str]) -> None:
    """Run several commands of `ip` or `tc` in one process."""
    batch = "".join(f"{line}\n" for line in lines)
    if batch:
        _output([tool, *(["-n", namespace] if namespace else []), "-batch", "-"], batch)


def _output(command: list[str], standard_input: str = "") -> str:
    _log.debug("%s: %s", " ".join(command), standard_input)
    # A session of its own: a Ctrl-C at the terminal must not kill `ip` half-way through building or reading.
    done = subprocess.run(
        command, input=standard_input, text=True, capture_output=True, check=False, start_new_session=True
    )
    if done.returncode != 0:
        raise LabError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. Its input was: {standard_input.strip()!r}. "
            "If this machine does not allow network namespaces, use the emulated lab (--emulate)."
        )
    return done.stdout
