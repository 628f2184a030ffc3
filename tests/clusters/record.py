"""Writes tests/recordings/slurm_own: the environments of real processes under the tests' Slurm.

Run it as root from the repository: `python -m tests.clusters.record`. Only variables about the job
are kept, so that no path and nothing private of the machine gets in.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clusters.recording import RECORDINGS, Scenario, prepared, write
from tests.clusters.requirements import program
from tests.clusters.slurm import SlurmCluster

FOLDER = RECORDINGS / "slurm_own"
KEPT = ("SLURM_", "SLURMD_", "CUDA_VISIBLE_DEVICES", "HOSTNAME")

BATCH = (
    "id=$(sbatch --parsable --output=/dev/null -N2 --wrap 'sleep 60'); "
    'until [ "$(squeue -hj $id -o %T)" = RUNNING ]; do sleep 0.1; done;'
)
"""Submits a job on two nodes, sets `id` to its id, and waits until it runs."""

SCENARIOS = [
    Scenario("salloc_shell", "the command of salloc itself", "salloc -N2 DUMP"),
    Scenario("salloc_srun", "srun inside salloc", "salloc -N2 --ntasks-per-node=2 srun DUMP"),
    Scenario(
        "step_on_second_node",
        "srun -N1 -n1 -w node02 inside salloc -N2",
        "salloc -N2 srun -N1 -n1 -w node02 DUMP",
    ),
    Scenario(
        "step_on_two_of_three",
        "srun -N2 -n2 -w node02,node03 inside salloc -N3",
        "salloc -N3 srun -N2 -n2 -w node02,node03 DUMP",
    ),
    Scenario(
        "overlap",
        "srun --overlap while another step holds all CPUs of the job",
        "salloc -N2 --ntasks-per-node=2 sh -c 'srun sleep 3 & srun --overlap DUMP; wait'",
    ),
    Scenario(
        "attached",
        "srun --jobid=ID -N2 -n2 outside of the job, sbatch -N2",
        f"{BATCH} srun --jobid=$id --overlap -N2 -n2 --ntasks-per-node=1 DUMP; scancel $id",
    ),
    Scenario(
        "attached_to_second_node",
        "srun --jobid=ID -N1 -n1 -w node02 outside of the job, sbatch -N2",
        f"{BATCH} srun --jobid=$id --overlap -N1 -n1 -w node02 DUMP; scancel $id",
    ),
    Scenario("cyclic", "srun -N2 --ntasks-per-node=2 -m cyclic", "srun -N2 --ntasks-per-node=2 -m cyclic DUMP"),
    Scenario("cyclic_uneven", "srun -N2 -n4 -m cyclic", "srun -N2 -n4 -m cyclic DUMP"),
    Scenario("plane2", "srun -N2 -n6 -m plane=2", "srun -N2 -n6 -m plane=2 DUMP"),
    Scenario(
        "arbitrary",
        "srun -n4 --distribution=arbitrary, SLURM_HOSTFILE: node02 node01 node01 node02",
        "printf 'node02\\nnode01\\nnode01\\nnode02\\n' > hostfile; "
        "salloc -N2 --ntasks-per-node=2 env SLURM_HOSTFILE=$PWD/hostfile srun -n4 --distribution=arbitrary DUMP",
    ),
    Scenario(
        "het_group_0_1",
        "srun --het-group=0,1 inside salloc -N1 -n1 : -N2 --ntasks-per-node=2",
        "salloc -N1 -n1 : -N2 --ntasks-per-node=2 srun --het-group=0,1 DUMP",
    ),
    Scenario(
        "het_reversed",
        "srun --het-group=0,1 inside salloc -n1 -w node03 : -n2 -w node[01-02]",
        "salloc -N1 -n1 -w node03 : -N2 -n2 -w 'node[01-02]' srun --het-group=0,1 DUMP",
    ),
    Scenario(
        "het_group_1",
        "srun --het-group=1 inside salloc -N1 -n1 : -N2 --ntasks-per-node=2",
        "salloc -N1 -n1 : -N2 --ntasks-per-node=2 srun --het-group=1 DUMP",
    ),
    Scenario(
        "het_srun_default",
        "srun without --het-group inside salloc -N1 -n1 : -N2 --ntasks-per-node=2",
        "salloc -N1 -n1 : -N2 --ntasks-per-node=2 srun DUMP",
    ),
    Scenario(
        "gpu_bind_single1",
        "srun -N2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=single:1",
        "srun -N2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=single:1 DUMP",
    ),
    Scenario(
        "gpus_per_task1",
        "srun -N2 --ntasks-per-node=2 --gpus-per-task=1",
        "srun -N2 --ntasks-per-node=2 --gpus-per-task=1 DUMP",
    ),
    Scenario(
        "batch_srun_fewer_tasks",
        "srun -n 2 --ntasks-per-node=1 inside sbatch -N2 --ntasks-per-node=2",
        "sbatch --wait -N2 --ntasks-per-node=2 --wrap 'srun -n 2 --ntasks-per-node=1 DUMP'",
    ),
    Scenario(
        "sbatch_in_step_elsewhere",
        "sbatch -w node02 typed in a task of srun on node01, the script",
        "srun -N1 -n1 -w node01 sbatch --wait -w node02 --wrap 'DUMP'",
    ),
    Scenario(
        "sbatch_two_in_step_elsewhere",
        "sbatch -N2 -w node02,node03 typed in a task of srun on node01, the script",
        "srun -N1 -n1 -w node01 sbatch --wait -N2 -w node02,node03 --wrap 'DUMP'",
    ),
    Scenario(
        "batch_export_none", "sbatch -N2 --export=NONE, the script", "sbatch --wait -N2 --export=NONE --wrap 'DUMP'"
    ),
    Scenario(
        "batch_gpus_per_task",
        "sbatch -N2 --ntasks-per-node=2 --gpus-per-task=1, the script",
        "sbatch --wait -N2 --ntasks-per-node=2 --gpus-per-task=1 --wrap 'DUMP'",
    ),
    Scenario(
        "batch_ntasks_per_gpu",
        "sbatch -N2 --gpus=4 --ntasks-per-gpu=1, the script",
        "sbatch --wait -N2 --gpus=4 --ntasks-per-gpu=1 --wrap 'DUMP'",
    ),
]


def record(cluster: SlurmCluster, scenario: Scenario, version: str) -> list[Path]:
    """Runs one scenario; returns the files that were written for it."""
    # From /run, so that SLURM_SUBMIT_DIR is a folder that any machine has.
    done = cluster.run("sh", "-ec", prepared(scenario, cluster.workdir), cwd=Path("/run"), check=True)
    print(f"{scenario.name}: {done.stdout}{done.stderr}", file=sys.stderr)
    return write(FOLDER, scenario, version, cluster.workdir, KEPT)


def slurm_version() -> str:
    """Name and version of the installed Slurm, like `Slurm 22.05.8`."""
    said = subprocess.run([program("slurmctld"), "-V"], capture_output=True, text=True, check=True, timeout=30).stdout
    return said.strip().replace("slurm-wlm", "Slurm")


def main() -> None:
    """Writes the recordings of all scenarios anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        SlurmCluster(Path(folder), ["node01", "node02", "node03"], gpus=2) as cluster,
    ):
        for scenario in SCENARIOS:
            for path in record(cluster, scenario, slurm_version()):
                print(path.relative_to(FOLDER))


if __name__ == "__main__":
    main()
