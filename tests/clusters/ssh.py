"""ssh between fake hosts: real servers, with keys that exist for one cluster only."""

import subprocess
from pathlib import Path

from tests.clusters.deadline import wait_for
from tests.clusters.hosts import Hosts
from tests.clusters.processes import HostProcess
from tests.clusters.requirements import program

START_TIMEOUT_S = 30

SERVER_CONFIG = """
HostKey {folder}/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
# Temporary folders often lie below one that others may write to.
StrictModes no
# Two busy cores: a launcher opens many connections at once.
MaxStartups 200
LoginGraceTime 60
UseDNS no
"""

CLIENT_CONFIG = """
Host *
    BatchMode yes
    StrictHostKeyChecking yes
    LogLevel ERROR
"""


def start_ssh(hosts: Hosts) -> None:
    """Starts a server on every host; from then on `ssh HOST COMMAND` works between all hosts, as root.

    The keys lie in the shared home folder, which root's account has to name: see `accounts.write_accounts`.
    """
    folder, own = hosts.workdir / "ssh", hosts.home / ".ssh"
    for path in (folder, own):
        path.mkdir(mode=0o700)
    host_key, user_key = folder / "host_key", own / "id_ed25519"
    for key in (host_key, user_key):
        argv = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "muster", "-f", str(key)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=START_TIMEOUT_S)
    public = host_key.with_suffix(".pub").read_text()
    known = [f"{name},{address} {public}" for name, address in hosts.addresses.items()]
    (own / "known_hosts").write_text("".join(known))
    (own / "authorized_keys").write_text(user_key.with_suffix(".pub").read_text())
    (own / "config").write_text(CLIENT_CONFIG.lstrip())
    (folder / "sshd_config").write_text(SERVER_CONFIG.format(folder=folder).lstrip())
    servers = {host: _start_server(hosts, host, folder) for host in hosts.addresses}
    for host, server in servers.items():
        wait_for(f"sshd of {host} to listen", lambda h=host, s=server: _listens(folder, h, s), START_TIMEOUT_S)


def _start_server(hosts: Hosts, host: str, folder: Path) -> HostProcess:
    log, pid_file = folder / f"{host}.log", folder / f"{host}.pid"
    options = ["-D", "-f", str(folder / "sshd_config"), "-E", str(log), "-o", f"PidFile={pid_file}"]
    # sshd has to be started by its absolute path, and requires this folder, which stays empty.
    script = 'mkdir -p -m 755 /run/sshd; exec "$0" "$@"'
    return hosts.popen(host, ["sh", "-ec", script, program("sshd"), *options])


def _listens(folder: Path, host: str, server: HostProcess) -> bool:
    if server.poll() is not None:
        log = folder / f"{host}.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        raise RuntimeError(f"sshd of {host} ended with {server.returncode}: {said}")
    # sshd writes this file when it listens.
    return (folder / f"{host}.pid").exists()
