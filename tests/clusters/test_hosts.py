"""The fake hosts themselves: the properties on which tests rely, and that nothing is left of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.hosts import Hosts
from tests.clusters.processes import processes_in
from tests.clusters.requirements import require_namespaces

pytestmark = [pytest.mark.cluster, pytest.mark.long]
ROOT = Path(__file__).parents[2]

# Prints what each client sends, until it is killed.
LISTEN = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    connection, (address, _) = server.accept()
    print(connection.recv(99).decode(), address, flush=True)
"""
SAY = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 1).sendall(socket.gethostname().encode())"


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    require_namespaces()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(["alpha", "beta"], tmp_path) as running:
        yield running


def _python(hosts: Hosts, host: str, code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return hosts.run(host, [sys.executable, "-S", "-c", code, *argv])


def _machine() -> list[str]:
    """What fake hosts could change in the machine's own namespaces, without what other programs change meanwhile."""
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True, timeout=30).stdout
    ours = [line for line in links.splitlines() if line.split()[1].startswith(("br0", "port", "eth0"))]
    own = ("/sys", "/run", "/dev/shm", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
    mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    hidden = sorted(mount for mount in mounts if mount in own)
    utab = str(Path("/run/mount").exists())  # mount(8) makes this folder for its list of mounts
    return [socket.gethostname(), Path("/etc/hosts").read_text(), utab, *ours, *hidden]


def test_each_host_has_its_own_name_and_address(hosts: Hosts) -> None:
    code = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    seen = [_python(hosts, host, code).stdout.split() for host in hosts.addresses]
    assert seen == [["alpha", "10.77.0.1"], ["beta", "10.77.0.2"]]
    assert socket.gethostname() not in hosts.addresses


def test_hosts_reach_each_other_by_name_and_nothing_else(hosts: Hosts) -> None:
    with hosts.popen("beta", [sys.executable, "-S", "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == "listening\n"
        assert _python(hosts, "alpha", SAY, "beta").returncode == 0
        assert server.stdout.readline() == "alpha 10.77.0.1\n"
        server.kill()
    with socket.create_server(("0.0.0.0", 0)) as outside:
        connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
        port = str(outside.getsockname()[1])
        assert "Connection refused" in _python(hosts, "alpha", connect, "127.0.0.1", port).stderr
        assert "unreachable" in _python(hosts, "alpha", connect, "192.0.2.1", port).stderr


def test_a_cut_link_is_cut_for_others_only_and_comes_back(hosts: Hosts) -> None:
    with hosts.popen("beta", [sys.executable, "-S", "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout
        server.stdout.readline()
        hosts.link("beta", up=False)
        assert _python(hosts, "alpha", SAY, "beta").returncode != 0
        assert _python(hosts, "beta", SAY, "beta").returncode == 0
        hosts.link("beta", up=True)
        wait_for("the restored link", lambda: _python(hosts, "alpha", SAY, "beta").returncode == 0, timeout_s=60)
        server.kill()


def test_run_and_shared_memory_are_each_hosts_own_and_files_are_shared(hosts: Hosts) -> None:
    made = "touch /run/made /dev/shm/made shared"
    hosts.run("alpha", ["sh", "-c", made], check=True)
    seen = hosts.run("beta", ["sh", "-c", "ls /run/made /dev/shm/made; ls shared"])
    assert seen.stdout == "shared\n"
    assert not Path("/run/made").exists()
    assert not Path("/dev/shm/made").exists()
    assert hosts.run("alpha", ["ls", "/sys/class/net", "/sys/fs/cgroup"]).stdout.split() == [
        "/sys/class/net:",
        "eth0",
        "lo",
        "/sys/fs/cgroup:",
    ]


def test_a_hosts_own_name_can_be_loopback_but_not_other_names(tmp_path: Path) -> None:
    code = "import socket; print(*[socket.gethostbyname(name) for name in ('alpha', 'beta')])"
    with Hosts(["alpha", "beta"], tmp_path, own_name_is_loopback=True) as hosts:
        assert _python(hosts, "alpha", code).stdout == "127.0.1.1 10.77.0.2\n"
        assert _python(hosts, "beta", code).stdout == "10.77.0.1 127.0.1.1\n"


def test_nothing_of_the_runners_environment_arrives(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_LEAK", "1")
    names = {line.partition("=")[0] for line in hosts.run("alpha", ["env"], env={"GIVEN": "1"}).stdout.splitlines()}
    assert names - {"PWD", "SHLVL", "_"} == {"GIVEN", "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER"}


def test_another_user(hosts: Hosts) -> None:
    assert hosts.run("alpha", ["id", "--user", "--name"], user="nobody", cwd="/").stdout == "nobody\n"


def test_a_deadline_names_the_command_and_host_and_ends_all_of_it(hosts: Hosts) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited 0.5 s for `sh -c .* on beta; it wrote:\nfirst"):
        hosts.run("beta", ["sh", "-c", "echo first; sleep 70 & sleep 80"], timeout=0.5)
    assert time.monotonic() - began < 20
    wait_for("beta to be empty", lambda: not hosts.processes("beta"), timeout_s=60)


def test_a_failed_command_shows_what_it_wrote(hosts: Hosts) -> None:
    with pytest.raises(RuntimeError, match=r"`sh -c .* on beta ended with 7; it wrote:\nout\nerr"):
        hosts.run("beta", ["sh", "-c", "echo out; echo err >&2; exit 7"], check=True)


def test_signals_reach_the_process_and_not_its_wrapper(hosts: Hosts) -> None:
    script = "trap 'echo warned' USR1; trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    with hosts.popen("alpha", ["sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "warned\n"
        process.terminate()
        assert process.stdout.readline() == "bye\n"
        assert process.wait(timeout=60) == 3


def test_processes_are_listed_a_host_and_die_with_it(hosts: Hosts) -> None:
    sleeper = hosts.popen("alpha", ["sleep", "90"])
    listed = wait_for("sleep to be listed", lambda: [p for p in hosts.processes("alpha") if p.name == "sleep"], 10)
    assert listed[0].argv == ["sleep", "90"]
    assert hosts.processes("beta") == []
    hosts.kill("alpha")
    assert sleeper.wait(timeout=60) == -signal.SIGKILL


def test_a_killed_host_starts_anew_with_its_name_and_address(hosts: Hosts) -> None:
    hosts.run("alpha", ["touch", "/run/gone"], check=True)
    hosts.kill("alpha")
    assert "No route to host" in _python(hosts, "beta", SAY.replace(", 1)", ", 10)"), "alpha").stderr
    hosts.start("alpha")
    assert "Connection refused" in _python(hosts, "beta", SAY, "alpha").stderr
    assert hosts.run("alpha", ["ls", "/run"], check=True).stdout.split() == ["lock", "user"]


def test_two_clusters_of_equal_names_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with Hosts(["alpha", "beta"], folders[0]) as first, Hosts(["alpha", "beta"], folders[1]) as second:
        assert first.addresses == second.addresses
        with first.popen("beta", [sys.executable, "-S", "-c", LISTEN], stdout=subprocess.PIPE) as server:
            assert server.stdout
            server.stdout.readline()
            assert _python(first, "alpha", SAY, "beta").returncode == 0
            assert "refused" in _python(second, "alpha", SAY, "beta").stderr
            server.kill()
        assert not first.namespaces() & second.namespaces()


def test_teardown_leaves_nothing(tmp_path: Path) -> None:
    before = _machine()
    with Hosts(["alpha", "beta", "gamma"], tmp_path) as hosts:
        namespaces = hosts.namespaces()
        # Three hosts of five namespaces, and a switch of three.
        assert len(namespaces) == 18
        hosts.run("alpha", ["sh", "-c", "setsid sleep 90 < /dev/null > /dev/null 2>&1 &"], check=True)
        hosts.popen("beta", ["sleep", "90"])
        assert _machine() == before
    assert processes_in(namespaces) == []
    assert _machine() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "hosts"]


def test_a_host_that_fails_to_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    hosts = Hosts(["alpha", "beta"], tmp_path, binds={tmp_path / "missing": Path("/etc")})
    with pytest.raises(RuntimeError, match=r"(?s)namespaces of alpha failed to start: mount: .*missing"), hosts:
        pass
    assert hosts.namespaces() == set()


@pytest.mark.parametrize("stage", ["starting", "running"])
def test_a_killed_runner_leaves_nothing(tmp_path: Path, stage: str) -> None:
    code = """
import sys, time
from pathlib import Path
from tests.clusters.hosts import Hosts
with Hosts(["alpha", "beta"], Path(sys.argv[1])) as hosts:
    hosts.popen("alpha", ["sh", "-c", "setsid sleep 90 & sleep 90"])
    print(*hosts.namespaces(), flush=True)
    time.sleep(90)
"""
    runner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with runner:
        assert runner.stdout
        if stage == "running":
            namespaces = set(runner.stdout.readline().split())
            assert processes_in(namespaces)
        else:
            wait_for("the first host's folder", (tmp_path / "hosts" / "alpha").exists, 30, interval_s=0.001)
            namespaces = set()
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait(timeout=60)
    wait_for("the killed runner's hosts to vanish", lambda: not processes_in(namespaces), timeout_s=60)
    wait_for(
        "commands that name its folder to vanish",
        lambda: not [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(entry)],
        timeout_s=60,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
