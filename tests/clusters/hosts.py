"""Fake hosts: several hosts on one machine, with their own names, addresses, processes and links.

A host is a set of Linux namespaces (net, uts, mount, pid, ipc) held by its process 1. The hosts of one
`Hosts` are connected by a bridge in a network namespace of its own. So nothing is created in the machine's
own namespaces, and two clusters may use the same names and addresses. The end of process 1 removes the host:
the kernel ends its processes and drops its mounts and interfaces.

Hosts share the machine's file system, as nodes of a cluster share theirs. `/run` and `/dev/shm` are each
host's own; `/etc/hosts` is the cluster's; `/sys` shows the host's interfaces and has no cgroups, so none can
be left behind. `/tmp` stays shared, because working directories and virtual environments often lie there.
"""

import ipaddress
import pwd
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.clusters.namespaces import PATH, START_TIMEOUT_S, Namespaces
from tests.clusters.processes import HostProcess, Process, namespace_of, processes_in
from tests.clusters.requirements import program

# The switch is also the gateway: it forwards, and has nowhere to forward to. So hosts have a default route as
# real ones do, and any address beyond the cluster is "unreachable" at once.
SWITCH_SCRIPT = """
ip link set lo up
ip link add br0 type bridge
ip address add {gateway} dev br0
ip link set br0 up
echo 1 > /proc/sys/net/ipv4/ip_forward
"""
FABRIC_SCRIPT = """
ip link add br1 type bridge
ip link set br1 up
"""

# mount -n: without it, mount(8) leaves the folder /run/mount on the machine.
HOST_SCRIPT = """
echo {name} > /proc/sys/kernel/hostname
mount -n --bind {dir}/hosts /etc/hosts
[ ! -f /etc/resolv.conf ] || mount -n --bind {dir}/resolv.conf /etc/resolv.conf
[ ! -f /etc/hostname ] || mount -n --bind {dir}/hostname /etc/hostname
mount -n -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lock /run/user
mount -n -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -n -t sysfs sysfs /sys
for all in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e "$all" ] || echo {no_ipv6} > "$all"; done
ip link set lo up
"""


class Hosts:
    """Fake hosts that exist inside `with`.

    Args:
        names: Host names, up to 200. The first gets address 10.77.0.1, and so on.
        workdir: An existing folder for the hosts' files; every host sees it. It stays.
        binds: Path on the machine to path that it is mounted over, on every host. Both exist.
        own_name_is_loopback: Each host's own name resolves to 127.0.1.1 there, as Debian's installer sets it.
        fabric_suffix: Each host has a second interface, ib0, in a network 10.78.0.0/24 of its own. Its name there is
            the host's with this suffix.
        is_ipv6: The hosts have no IPv4 address but 127.0.0.1: the first is fd00:77::1, and so on.
    """

    def __init__(
        self,
        names: Sequence[str],
        workdir: Path,
        *,
        binds: Mapping[Path, Path] | None = None,
        own_name_is_loopback: bool = False,
        fabric_suffix: str = "",
        is_ipv6: bool = False,
    ) -> None:
        if not names or len(set(names)) != len(names) or len(names) > 200:
            raise ValueError(f"1 to 200 different host names are needed, not {list(names)}")
        network = ipaddress.ip_network("fd00:77::/64" if is_ipv6 else "10.77.0.0/24")
        self.workdir = workdir
        self.addresses = {name: str(network[number]) for number, name in enumerate(names, start=1)}
        self.home = workdir / "home"
        self._gateway = str(network[254])
        self._prefix_length = network.prefixlen
        self._is_ipv6 = is_ipv6
        self._fabric_suffix = fabric_suffix
        self._binds = dict(binds or {})
        self._own_name_is_loopback = own_name_is_loopback
        self._switch: Namespaces | None = None
        self._live: dict[str, Namespaces] = {}
        self._started: list[HostProcess] = []

    def __enter__(self) -> Self:
        self.home.mkdir(exist_ok=True)
        try:
            script = SWITCH_SCRIPT.format(gateway=f"{self._gateway}/{self._prefix_length}{self._no_probing}")
            script += FABRIC_SCRIPT if self._fabric_suffix else ""
            self._switch = Namespaces("the switch", ["net", "mount"], script)
            for name in self.addresses:
                self._live[name] = self._create(name)
            for namespaces in (self._switch, *self._live.values()):
                namespaces.await_ready()
            for name in self.addresses:
                self._plug_in(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hosts and every process on them."""
        while self._live:
            self._live.popitem()[1].kill()
        if self._switch:
            self._switch.kill()
            self._switch = None
        for process in self._started:
            process.wait(timeout=START_TIMEOUT_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        self._started.clear()

    def popen(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        user: str | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> HostProcess:
        """Starts a process on a host.

        Its environment is that of a fresh login (PATH, HOME, USER, LANG...) and `env`: no variable of the test
        runner's. It starts in `cwd`, by default the shared home folder, and ends when the runner does.
        """
        account = pwd.getpwnam(user or "root")
        become = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"] if user else []
        home = account.pw_dir if user else str(self.home)
        # A session of its own: all its processes can be ended at once, and the runner's terminal is not in it.
        inside = [program("setsid"), program("setpriv"), *become, "--pdeathsig=KILL", "--"]
        inside += ["/usr/bin/env", f"--chdir={cwd or home}", "--", *map(str, argv)]
        login = {"HOME": home, "LANG": "C.UTF-8", "LOGNAME": account.pw_name, "PATH": PATH, "SHELL": "/bin/bash"}
        process = HostProcess(
            [*self._live[host].enter("-n", "-u", "-m", "-i", "-p"), *inside],
            env={**login, "USER": account.pw_name, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
        )
        self._started.append(process)
        return process

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        cwd: Path | str | None = None,
        user: str | None = None,
        input: str | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process on a host to its end; returns it with its output. See `popen` for its environment.

        Raises:
            TimeoutError: It did not end within `timeout` seconds, and was killed.
            RuntimeError: `check` is set and it failed.
        """
        command = shlex.join(map(str, argv))
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        pipe = subprocess.PIPE
        process = self.popen(host, argv, env=env, cwd=cwd, user=user, stdin=stdin, stdout=pipe, stderr=pipe)
        try:
            out, err = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.drain()
            raise TimeoutError(f"waited {timeout:g} s for `{command}` on {host}; it wrote:\n{out}{err}") from None
        finally:
            if process.poll() is not None:
                self._started.remove(process)
        if check and process.returncode:
            raise RuntimeError(f"`{command}` on {host} ended with {process.returncode}; it wrote:\n{out}{err}")
        return subprocess.CompletedProcess([*argv], process.returncode, out, err)

    def processes(self, host: str) -> list[Process]:
        """The processes on a host, without its process 1."""
        init = self._live[host].init
        return [process for process in processes_in({f"{namespace_of(init, 'pid')}"}) if process.pid != init]

    def namespaces(self) -> set[str]:
        """The identities of all namespaces that the hosts and their switch consist of."""
        return {
            identity
            for namespaces in (self._switch, *self._live.values())
            if namespaces
            for identity in namespaces.identities()
        }

    def network(self, host: str) -> Path:
        """The file of a host's network namespace, for a program outside that joins it."""
        return Path(f"/proc/{self._live[host].init}/ns/net")

    def link(self, host: str, *, up: bool) -> None:
        """Cuts or restores the link of a host: while it is cut, packets to and from other hosts are lost silently."""
        self._ip_switch(f"link set {self._port(host)} {'up' if up else 'down'}\n")

    def kill(self, host: str) -> None:
        """Ends a host as a power cut would: all its processes die at once, and other hosts get no last packets."""
        self._ip_switch(f"link delete {self._port(host)}\n")
        self._live.pop(host).kill()

    def start(self, host: str) -> None:
        """Starts a killed host again, with the same name and address and an empty /run."""
        self._live[host] = self._create(host)
        self._live[host].await_ready()
        self._plug_in(host)

    def _create(self, host: str) -> Namespaces:
        return Namespaces(host, ["net", "uts", "mount", "ipc"], self._host_script(host))

    def _plug_in(self, host: str) -> None:
        live, port = self._live[host], self._port(host)
        self._ip_switch(f"link add {port} type veth peer name eth0 netns {live.init}\nlink set {port} master br0 up\n")
        route = f"route add default via {self._gateway}"
        address = f"{self.addresses[host]}/{self._prefix_length}"
        live.ip(f"address add {address} dev eth0{self._no_probing}\nlink set eth0 up\n{route}\n")
        if self._fabric_suffix:
            end = f"link add {port}i type veth peer name ib0 netns {live.init}\nlink set {port}i master br1 up\n"
            self._ip_switch(end)
            live.ip(f"address add {self._fabric_address(host)}/24 dev ib0\nlink set ib0 up\n")

    @property
    def _no_probing(self) -> str:
        # Otherwise an IPv6 address can't be used until the kernel has looked for duplicates of it.
        return " nodad" if self._is_ipv6 else ""

    def _fabric_address(self, host: str) -> str:
        return f"10.78.0.{list(self.addresses).index(host) + 1}"

    def _port(self, host: str) -> str:
        return f"port{list(self.addresses).index(host) + 1}"

    def _ip_switch(self, batch: str) -> None:
        assert self._switch
        self._switch.ip(batch)

    def _host_script(self, name: str) -> str:
        folder = self.workdir / "hosts" / name
        folder.mkdir(parents=True, exist_ok=True)
        known = dict(self.addresses)
        if self._own_name_is_loopback:
            known[name] = "127.0.1.1"
        lines = [f"{address} {host}\n" for host, address in known.items()]
        if self._fabric_suffix:
            lines += [f"{self._fabric_address(host)} {host}{self._fabric_suffix}\n" for host in known]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (folder / "hostname").write_text(f"{name}\n")
        # No name server answers: a lookup shall fail soon.
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        binds = [shlex.join(["mount", "-n", "--bind", str(source), str(to)]) for source, to in self._binds.items()]
        script = HOST_SCRIPT.format(
            name=shlex.quote(name), dir=shlex.quote(str(folder)), no_ipv6=int(not self._is_ipv6)
        )
        return script + "\n".join(binds)
