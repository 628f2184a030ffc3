"""What the agent adds to torchrun: it counts restarts, exchanges heartbeats and failures, and leaves in order."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from muster.entrypoint.agent.agent import LEFT, STARTER, leave
from muster.entrypoint.agent.nodes import Nodes
from muster.paths import ROOT
from muster.processes import how_ended
from tests.train.conftest import free_port

AGENT = [sys.executable, "-P", "-m", "muster.entrypoint.agent"]
ONE_NODE = ["--nnodes=1", "--rdzv-backend=static", "--master-port=0", "--nproc-per-node=2"]


def ran(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `script` as two workers of an agent in `folder`; returns the completed process."""
    (folder / "script.py").write_text(script)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "MUSTER_COMMAND") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    argv = [*AGENT, *ONE_NODE, *options, "script.py"]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("code", "words"), [(1, "ended with exit code 1"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")]
)
def test_how_a_worker_ended(code: int, words: str) -> None:
    assert how_ended(code) == words


class Store:
    """A stand-in for the agents' store, in which the other node leaves when the count is polled for the third time."""

    def __init__(self) -> None:
        self.count = self.looks = 0

    def add(self, key: str, number: int) -> int:
        assert key == LEFT
        self.looks += number == 0
        self.count += number + (self.looks == 3)
        return self.count


def test_the_node_with_the_store_leaves_last() -> None:
    store = Store()
    for rank, looks in ((1, 0), (0, 3)):
        store.count = 0
        leave(SimpleNamespace(_store=store, _worker_group=SimpleNamespace(group_world_size=2, group_rank=rank)))
        assert store.looks == looks


def test_a_store_that_is_gone_keeps_nobody() -> None:
    # Every call of a store that is None fails.
    leave(SimpleNamespace(_store=None, _worker_group=SimpleNamespace(group_world_size=2, group_rank=0)))


def test_the_level_of_the_agents_log_is_not_that_of_its_ranks() -> None:
    code = "import os; from muster.entrypoint.agent import __main__; print(os.environ.get('TORCH_CPP_LOG_LEVEL'))"
    for given in ("None", "INFO"):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        env |= {} if given == "None" else {"TORCH_CPP_LOG_LEVEL": given}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
        assert done.stdout == f"{given}\n", done.stderr


DIES = """
import os, sys
os.write(1, f"{os.environ['MUSTER_LAUNCH']} {os.getppid()}\\n".encode())
if os.environ["RANK"] == "1":
    sys.exit(int(open("code").read()))
import time
time.sleep(600)
"""


def test_workers_that_fail_each_time_end_with_a_count(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("75")  # with this code our own programs would not restart, others do
    done = ran(tmp_path, DIES, "--max-restarts=2")
    assert done.returncode == 1
    assert done.stderr.count("ended with exit code 75: the ranks start again, restart ") == 2
    assert "ended with exit code 75, and --max-restarts=2 allows no more restarts" in done.stderr
    # All see one launch id, which ends with the process id of the agent, the workers' parent.
    [(word, parent)] = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert word.endswith(f".{parent}")


@pytest.mark.parametrize("code", [2, 75])
def test_codes_2_and_75_of_our_programs_cause_no_restart(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").write_text(str(code))
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    done = ran(tmp_path, DIES, "--max-restarts=2")
    assert done.returncode == code
    assert "start again" not in done.stderr


ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(3)
    sys.exit(7)
if len(sys.argv) > 2:
    time.sleep(600)
"""


@pytest.mark.parametrize("others", ["are done", "sleep"])
def test_one_failure_on_another_node_keeps_nobody_waiting(tmp_path: Path, others: str) -> None:
    """Otherwise a node that is done waits for 5 minutes, and one that sleeps never ends: longer than the deadlines."""
    (tmp_path / "script.py").write_text(ONE_FAILS)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    port = free_port()
    argv = [*AGENT, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static"]
    argv += ["--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-conf=timeout=240", "--max-restarts=0"]
    # In one case a node that is done reads of the failure; in the other the node with the store fails, and reports it.
    script = ["script.py", "1"] if others == "are done" else ["script.py", "0", "sleep"]
    nodes = [
        subprocess.Popen([*argv, f"--node-rank={node_rank}", *script], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
        for node_rank in range(2)
    ]
    try:
        said = [node.communicate(timeout=240)[1].decode() for node in nodes]
        assert [node.returncode for node in nodes] == ([0, 1] if others == "are done" else [1, 1]), said
        if others == "sleep":
            assert f"error: rank 0 on {socket.gethostname()} ended with exit code 7" in said[0]
            assert f"was ended: rank 0 on {socket.gethostname()} failed: it ended with exit code 7" in said[1]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_nodes_that_wait_for_another_hear_of_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    argv = [*AGENT, "--nnodes=3", "--nproc-per-node=1", "--rdzv-backend=static", "--rdzv-conf=timeout=240"]
    argv += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    # A process that starts the tests in the background may make them ignore SIGINT.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    env = {**kept, "PYTHONPATH": str(ROOT)}
    nodes = [
        subprocess.Popen([*argv, f"--node-rank={rank}", "x.py"], cwd=tmp_path, env=env, **hears) for rank in (0, 1)
    ]
    try:
        torchs: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        store = torchs("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=240))
        store.wait(["muster/came/0", "muster/came/1"])
        nodes[1].send_signal(signal.SIGINT)
        assert nodes[1].wait(60) == 130
        assert not store.check(["muster/came/1"])  # else it would be refused when it is started again
        nodes[0].send_signal(signal.SIGINT)
        assert nodes[0].wait(60) == 130
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.parametrize(
    "meets",
    [
        ["--rdzv-backend=static", "--master-addr=127.0.0.1", "--master-port={port}", "--rdzv-conf=timeout=240"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0,join_timeout=240"],
    ],
    ids=["fixed", "elastic"],
)
def test_ctrl_c_is_heard_where_what_listens_does_not_answer(tmp_path: Path, meets: list[str]) -> None:
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(240)
        port = silent.getsockname()[1]
        argv = [*AGENT, "--nnodes=2", "--node-rank=1", "--nproc-per-node=1"]
        argv += [*(word.format(port=port) for word in meets), "x.py"]
        node = subprocess.Popen(argv, cwd=tmp_path, env={**kept, "PYTHONPATH": str(ROOT)}, **hears)
        try:
            silent.accept()[0].close()  # the agent's check whether anything listens
            with silent.accept()[0]:  # torch's store
                time.sleep(0.5)
                node.send_signal(signal.SIGINT)
                assert node.wait(30) == 130
        finally:
            node.kill()
            node.wait()


JOINS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
time.sleep(1)
dist.destroy_process_group()
"""
FOR_LONG = """
import runpy
from muster.entrypoint.agent import agent
agent.BRIEF_S = 0
runpy.run_module("muster.entrypoint.agent", run_name="__main__", alter_sys=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("script", ["", pytest.param(JOINS, marks=pytest.mark.full)], ids=["apart", "together"])
def test_ranks_that_open_no_process_group_cause_a_warning(tmp_path: Path, script: str, num_nodes: int) -> None:
    (tmp_path / "script.py").write_text(script)
    port = free_port()
    argv = [sys.executable, "-P", "-c", FOR_LONG, f"--nnodes={num_nodes}", f"--nproc-per-node={3 - num_nodes}"]
    argv += ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-conf=timeout=240"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen([*argv, f"--node-rank={node}", "script.py"], cwd=tmp_path, env=env, stderr=subprocess.PIPE)
        for node in range(num_nodes)
    ]
    try:
        said = "".join(node.communicate(timeout=240)[1].decode() for node in nodes)
        assert [node.returncode for node in nodes] == [0] * num_nodes, said
        assert said.count("none of the 2 ranks opened a process group") == (not script), said
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


SMALL = ("--data=digits", "--image-size=16", "--batch-size=8", "--num-samples=64", "--max-steps=2", "--device=cpu")


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ("muster", "run", "--nproc-per-node=2", "joins.py"),
        pytest.param(("train", "ddp", "--nproc-per-node=2", *SMALL), marks=pytest.mark.full),
        pytest.param(("train", "ddp", "--spawn=2", *SMALL), marks=pytest.mark.full),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_on_one_node_nothing_listens_to_other_hosts(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Anybody who can connect to torch's store can run code through it."""
    (tmp_path / "joins.py").write_text(JOINS)
    program = Path(sys.executable).parent / words[0]
    with (tmp_path / "said").open("w") as said:
        started = psutil.Popen([program, *words[1:]], cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    addresses: set[str] = set()
    end = time.monotonic() + 400
    while started.poll() is None and time.monotonic() < end:
        with suppress(psutil.NoSuchProcess):
            ours = {started.pid, *(child.pid for child in started.children(recursive=True))}
            sockets = psutil.net_connections(kind="tcp")
            listening = [each for each in sockets if each.pid in ours and each.status == psutil.CONN_LISTEN]
            addresses |= {each.laddr.ip for each in listening if each.laddr}
        time.sleep(0.2)
    assert started.poll() == 0, (tmp_path / "said").read_text()
    assert addresses == {"127.0.0.1"}


def test_a_program_that_is_not_there_is_told_without_a_traceback() -> None:
    words = [sys.executable, "-I", "-S", "-c", STARTER, str(os.getpid()), "/no/such\x1b[2Jprogram"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 3)
    assert "/no/such" in done.stderr
    assert "\x1b" not in done.stderr


QUICK = """
import os, runpy, signal, time
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from muster.entrypoint.agent import agent, nodes
nodes.BEAT_S, agent.BRIEFLY_S = 0.5, 0.5
begin = SimpleElasticAgent.__init__
def quick(self, spec, exit_barrier_timeout, *others, **named):
    begin(self, spec, 1.0, *others, **named)
SimpleElasticAgent.__init__ = quick
if "DIES_AS_THEY_MEET" in os.environ:
    SimpleElasticAgent._assign_worker_ranks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if "STAYS_AS_THEY_MEET" in os.environ:
    SimpleElasticAgent._assign_worker_ranks = lambda *_: (open("meets", "w").close(), time.sleep(240))
open("loaded" + os.environ["NODE"], "w").close()
end = time.monotonic() + 240
while not (os.path.exists("loaded0") and os.path.exists("loaded1")) and time.monotonic() < end:
    time.sleep(0.01)
runpy.run_module("muster.entrypoint.agent", run_name="__main__", alter_sys=True)
"""
"""An agent that counts a silent node as dead after 5 s instead of 45, and for which torch's barrier lasts one second.

It starts when both agents have loaded: an elastic node that is ready long before the other would train alone.
"""

WORKS = """
import os, sys, time
works = os.environ["RANK"] in sys.argv[1]
os.write(1, b"works\\n" if works else b"is done\\n")
if works:
    while not os.path.exists("go"):
        time.sleep(0.05)
if sys.argv[1] == "all fail":
    open(os.environ["RANK"], "w").close()
    while not (os.path.exists("0") and os.path.exists("1")):
        time.sleep(0.01)
    sys.exit(2)
"""


MEETS = ["--rdzv-backend=static", "--rdzv-conf=timeout=240", "--master-addr=127.0.0.1"]
FIXED = [*MEETS, "--nnodes=2", "--max-restarts=0"]
ELASTIC = ["--nnodes=1:2", "--rdzv-backend=c10d", "--max-restarts=3"]


@contextmanager
def two_nodes(
    folder: Path, words: str, options: list[str] = FIXED, patience_s: int = 60, **second: str
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Starts the agents of two nodes with a worker each; the ranks in `words` work until there is a file `go`.

    With the `words` "all fail" both ranks end at once, with code 2. `second`: variables of the second agent.
    `patience_s`: seconds for which torch waits for an elastic node that is late, or silent.
    """
    (folder / "script.py").write_text(WORKS)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    port = free_port()
    argv = [sys.executable, "-P", "-c", QUICK, "--nproc-per-node=1", *options]

    def place(node: int) -> list[str]:
        if options is FIXED:
            return [f"--master-port={port}", f"--node-rank={node}"]
        # torch sorts the nodes by their addresses.
        where = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr=127.0.0.{node + 1}"]
        waits = f"last_call_timeout={patience_s},keep_alive_interval=1,keep_alive_max_attempt={patience_s}"
        return [*where, f"--rdzv-conf=is_host={1 - node},join_timeout=240,read_timeout={4 * patience_s},{waits}"]

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [
        subprocess.Popen(
            [*argv, *place(node), "script.py", words],
            cwd=folder,
            env=env | {"NODE": str(node)} | (second if node else {}),
            text=True,
            **pipes,
        )
        for node in range(2)
    ]
    try:
        begin = 0 if "STAYS_AS_THEY_MEET" in second else 1 if second else 2
        for rank, node in enumerate(nodes[:begin]):
            assert node.stdout is not None
            first = node.stdout.readline()
            assert first == ("works\n" if str(rank) in words else "is done\n"), first or node.communicate(timeout=240)
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


@pytest.mark.full
def test_an_option_that_no_rank_knows_is_no_other_ranks_fault(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "all fail") as nodes:
        said = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], said
    for rank in range(2):
        assert f"error: rank {rank} on {socket.gethostname()} ended with exit code 2\n" in said[rank]


@pytest.mark.full
def test_a_launch_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "01") as nodes:
        time.sleep(1)  # until both have received the other's heartbeat
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for node in nodes:
                node.send_signal(number)
            time.sleep(7)
        (tmp_path / "go").touch()
        assert [node.wait(30) for node in nodes] == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("options", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_a_finished_node_waits_for_nodes_that_still_work(tmp_path: Path, options: list[str], rank: str) -> None:
    with two_nodes(tmp_path, rank, options) as nodes:
        with pytest.raises(subprocess.TimeoutExpired):
            nodes[1 - int(rank)].wait(5)
        (tmp_path / "go").touch()
        said = [node.communicate(timeout=30)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0]
        assert "Traceback" not in "".join(said)


@pytest.mark.full
def test_a_finished_node_ends_in_order_if_the_node_with_the_store_was_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKS)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    argv = [*AGENT, *FIXED, f"--master-port={free_port()}", "--nproc-per-node=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [
        subprocess.Popen(
            [*argv, f"--node-rank={node}", "script.py", "0"],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(ROOT)},
            text=True,
            **pipes,
        )
        for node in range(2)
    ]
    try:
        assert nodes[1].stdout is not None
        assert nodes[1].stdout.readline() == "is done\n"
        time.sleep(1)  # it waits for the other
        nodes[0].kill()
        said = nodes[1].communicate(timeout=60)[1]
        assert (nodes[1].returncode, "Traceback" in said) == (0, False), said
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


@pytest.mark.full
def test_nodes_go_on_without_one_that_is_silent(tmp_path: Path) -> None:
    """Even where no other rank can notice that its rank has ended, as while ranks wait for each other to start."""
    with two_nodes(tmp_path, "01", ELASTIC, patience_s=6) as nodes:
        time.sleep(2)  # until both have received the other's heartbeat
        nodes[1].kill()
        assert nodes[0].stdout is not None
        assert nodes[0].stdout.readline() == "works\n"
        (tmp_path / "go").touch()
        said = nodes[0].communicate(timeout=30)[1]
        assert nodes[0].returncode == 0, said
        assert "its host gave no sign of life" in said
        assert "goes on with 1 node instead of 2" in said


@pytest.mark.full
def test_nodes_go_on_without_one_that_ends_while_they_meet(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "0", ELASTIC, patience_s=6, DIES_AS_THEY_MEET="1") as nodes:
        (tmp_path / "go").touch()
        said = nodes[0].communicate(timeout=30)[1]
        assert nodes[0].returncode == 0, said
        assert "a node joined and then ended: the others meet again" in said


@pytest.mark.full
def test_a_node_hears_of_signals_while_it_waits_for_one_that_had_come(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "01", ELASTIC, STAYS_AS_THEY_MEET="1") as nodes:
        end = time.monotonic() + 240
        while not (tmp_path / "meets").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(3)  # the first, which polls each second, waits for a key that the second has not written
        nodes[0].terminate()
        assert nodes[0].wait(15) == 1


def test_a_node_that_ends_before_its_first_sign_of_life_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the other's ranks would wait for its ranks until --timeout-s. A node that has left is not missed."""
    monkeypatch.setattr("muster.entrypoint.agent.nodes.BEAT_S", 0.1)  # also the limit of each exchange
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    for has_left in (False, True):
        store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if has_left:
            store.set("muster/node/1", "")
        workers = [SimpleNamespace(global_rank=0, world_size=2)]
        group = SimpleNamespace(store=SimpleNamespace(underlying_store=store), group_rank=0, group_world_size=2)
        group.workers, group.master_addr, group.master_port = workers, "127.0.0.1", store.port
        agent = SimpleNamespace(processes=dict[int, tuple[int, int | None]])
        own = Nodes(agent, group, {}, is_fixed=True)
        end = time.monotonic() + (2 if has_left else 30)
        while not own.reason and time.monotonic() < end:
            time.sleep(0.02)
        missed = "rank 1 on node rank 1 failed: its host gave no sign of life for 1 s"
        assert own.reason == ("" if has_left else missed)
        own.leave()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert ("error: node rank 1 gave no sign of life" in said and "  fix: " in said) == (not has_left)
