"""`muster doctor` under a real Slurm: it names each fault with its node, and reports nothing on healthy nodes."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from muster.paths import ROOT
from tests.clusters.requirements import SLURM_PROGRAMS, require_namespaces, require_programs
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import MUSTER, ONE_THREAD, TRAIN

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NODES = ("node01", "node02", "node03")
ENV = {**ONE_THREAD}

# On this host alone, adds image.json to the files in the checkout's folder, as the build of an image does.
AS_IMAGE = """
mkdir /run/checkout
mount -n --rbind {root} /run/checkout
mount -n -t tmpfs tmpfs {root}
cd /run/checkout
for entry in * .venv*; do
  if [ -L "$entry" ]; then cp -P "$entry" {root}/; continue; fi
  if [ -d "$entry" ]; then mkdir "{root}/$entry"; elif [ -e "$entry" ]; then touch "{root}/$entry"; else continue; fi
  mount -n --rbind "$entry" "{root}/$entry"
done
printf %s {image} > {root}/image.json
"""
FULL = """
mkdir -p {folder}
mount -n -t tmpfs -o size=64k tmpfs {folder}
! dd if=/dev/zero of={folder}/checkpoint bs=4k 2> /dev/null
"""
SMALL_SHM = "mount -n -o remount,size=16m /dev/shm"
OTHER_CODE = """
{{ cat {code}; echo '# another'; }} > /run/code-of-another-day
mount -n --bind /run/code-of-another-day {code}
"""

# Slurm gives each node the same number of GPUs; node03 then has one less, as after a failure of one.
FEWER_GPUS = '[ "$(hostname)" != node03 ] || export CUDA_VISIBLE_DEVICES=0; exec "$@"'

LOOKS = """
import sys
from muster.check.doctor.run import Report, check
from muster.check.ranks import join, leave
from muster.check.options import DoctorOptions

world = join(60)
for number in range(50):
    found = Report()
    # The last one with the collectives too.
    check(world, DoctorOptions(quick=number < 49, checkpoint_dir=sys.argv[1]), found)
    if world.main:
        print("look", number, len(found.parts), [vars(finding) for finding in found.findings], flush=True)
leave(world, 0)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes for this module alone: its tests plant faults in them."""
    require_programs(*SLURM_PROGRAMS)
    require_namespaces()
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), NODES, gpus=2) as cluster:
        yield cluster


def doctor(cluster: SlurmCluster, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `muster doctor --json` on all nodes, with a rank and 2 GPUs on each, and its output."""
    command = [MUSTER, "doctor", "--json", "--nproc-per-node=1", *options]
    where = [f"-N{len(NODES)}", "--ntasks-per-node=1", "--gpus-per-node=2"]
    done = cluster.srun(*where, "sh", "-c", FEWER_GPUS, "sh", *command, timeout=400, env=ENV)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        pytest.fail(f"{done.returncode}\n{done.stdout}\n{done.stderr}")


def test_healthy_nodes(cluster: SlurmCluster) -> None:
    where = [f"-N{len(NODES)}", "--ntasks-per-node=1"]
    folder = str(cluster.shared / "runs")
    done = cluster.srun(
        *where, MUSTER, "doctor", "--nproc-per-node=1", f"--checkpoint-dir={folder}", env=ENV, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes x 1 = 3 ranks" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ok: ")
    assert "\x1b" not in done.stdout


@pytest.mark.long
def test_no_false_alarm_in_50_looks(cluster: SlurmCluster) -> None:
    script = cluster.shared / "looks.py"
    script.write_text(LOOKS)
    command = [MUSTER, "run", "--nproc-per-node=1", str(script), str(cluster.shared / "runs")]
    done = cluster.srun("-N2", "--ntasks-per-node=1", *command, timeout=400, env=ENV)
    looks = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line.startswith("look ")]
    assert [int(number) for _, number, *_ in looks] == list(range(50)), done.stdout + done.stderr
    assert [found for *_, found in looks if found != "[]"] == []
    assert int(looks[-1][2]) == int(looks[0][2]) + 1
    assert done.returncode == 0, done.stderr


# On one node the command does not start.
ONE_STAYS_AWAY = '[ "$(hostname)" != node02 ] || exit 0; exec "$@"'


def test_a_node_that_does_not_come_is_named(cluster: SlurmCluster) -> None:
    where = [f"-N{len(NODES)}", "--ntasks-per-node=1"]
    command = [MUSTER, "doctor", "--nproc-per-node=1", "--rdzv-timeout=15"]
    done = cluster.srun(*where, "sh", "-c", ONE_STAYS_AWAY, "sh", *command, timeout=400, env=ENV)
    assert done.returncode == 1, done.stderr
    assert "node02 did not come within 15 s; 2 of 3 did" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def spoilt(cluster: SlurmCluster) -> SlurmCluster:
    """The cluster with a fault on each of its nodes."""
    root = ROOT
    code = shlex.quote(str(root / "muster" / "units.py"))
    words = {"root": shlex.quote(str(root)), "code": code, "folder": str(cluster.shared / "full")}
    for node in NODES:
        image = {"version": "1.1.0" if node == "node03" else "1.2.0", "revision": "0123456789abcdef"}
        script = AS_IMAGE.format(image=shlex.quote(json.dumps(image)), **words)
        cluster.hosts.run(node, ["sh", "-ec", script], check=True)
    cluster.hosts.run("node01", ["sh", "-ec", SMALL_SHM], check=True)
    cluster.hosts.run("node02", ["sh", "-ec", OTHER_CODE.format(**words) + FULL.format(**words)], check=True)
    return cluster


PLANTED = {
    ("node02", "code"): "on node02",
    ("node02", "checkpoints"): "No space left on device",
    ("node03", "image"): "1.1.0 (0123456789ab) on node03, 1.2.0 (0123456789ab) on node01, node02",
    ("node03", "gpus"): "1 on node03, 2 on node01, node02",
}


def test_each_fault_is_reported_with_its_node(spoilt: SlurmCluster) -> None:
    code, told = doctor(spoilt, f"--checkpoint-dir={spoilt.shared / 'full' / 'runs'}")
    faults = {(each["host"], each["about"]): each["seen"] for each in told["findings"] if each["level"] == "failed"}
    assert faults.keys() == PLANTED.keys(), told
    for place, seen in PLANTED.items():
        assert seen in faults[place]
    assert (code, told["code"]) == (2, 2)
    # Torch sees none of Slurm's GPUs, which are stand-ins.
    others = {(each["host"], each["about"]): each["seen"] for each in told["findings"] if each["level"] == "warning"}
    assert others.keys() == {("node01, node02", "gpus"), ("node03", "gpus"), ("node01", "shm")}
    assert "of 16M" in others["node01", "shm"]


def test_a_training_with_preflight_ends_before_it_begins(spoilt: SlurmCluster) -> None:
    runs = spoilt.shared / "full" / "runs"
    command = [TRAIN, "ddp", "--preflight", "--nproc-per-node=1", "--data=digits", f"--runs-dir={runs}", "--name=no"]
    done = spoilt.srun("--nodelist=node01,node02", "-N2", "--ntasks-per-node=1", *command, timeout=400, env=ENV)
    assert done.returncode == 2, done.stderr
    assert "failed: node02: no checkpoint can be written" in done.stderr
    # With two nodes, nothing shows which of them has the right code.
    assert "failed: node01, node02: not all nodes have the same code of this project" in done.stderr
    assert done.stderr.count("error: the nodes are not fit to train on") == 1
    assert "Traceback" not in done.stderr
    assert not (runs / "no").exists()
