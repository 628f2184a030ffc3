"""Writes tests/recordings/grid_engine_own: the environments of real processes under the tests' Grid Engine.

Run it as root from the repository: `python -m tests.clusters.record_grid_engine`.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.record_mpi import HYDRA, OPENMPI, commands, mpi_versions
from tests.clusters.recording import RECORDINGS, Scenario, prepared, write

FOLDER = RECORDINGS / "grid_engine_own"
KEPT = (
    *("JOB_", "SGE_", "PE$", "PE_", "NSLOTS$", "NHOSTS$", "NQUEUES$", "QUEUE$", "QRSH_", "TASK_ID$", "ARC$"),
    *("ENVIRONMENT$", "REQ", "RESTARTED$", "CUDA_VISIBLE_DEVICES", "HOSTNAME$", "TMPDIR$", "TMP$"),
    *("SLURM", "PMI", "OMPI_", "MPI", "HYDRA", "HYDI", "RANK$", "WORLD_SIZE$", "LOCAL_RANK$"),
)
NO_RANK = "MUSTER_NO_RANK"  # Grid Engine gives processes no rank, so no variable has one.
TWO = "-pe two 4"

# The job script gives the slave tasks their ranks, in the order of the host file.
SLAVES = """rank=0
while read -r host slots _; do
  for slot in $(seq $slots); do qrsh -inherit {option} $host DUMP $rank & rank=$((rank + 1)); done
done < $PE_HOSTFILE
wait
"""

# Variables of a shell inside another job, or in which somebody tried torchrun by hand: qsub -V passes them on.
LEAKED = {
    **{"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    **{"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "other[1-2]"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "3"},
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"},
}


@dataclass(frozen=True)
class Submission:
    """A scenario whose script is a job script; `options` are qsub's; `leaked`: qsub has the variables LEAKED."""

    scenario: Scenario
    options: str = ""
    leaked: bool = False


def _job(name: str, options: str, script: str = "DUMP", *, leaked: bool = False, within: str = "") -> Submission:
    title = f"{within} inside qsub {options}".strip() if within else f"qsub {options}".strip()
    return Submission(Scenario(name, title, script, NO_RANK, "the job script"), options, leaked)


def _mpi(name: str, within: str, script: str, rank: str) -> Submission:
    return Submission(commands(Scenario(name, f"{within} inside qsub {TWO}", script, rank)), TWO)


SUBMISSIONS = [
    _job("serial_script", ""),
    _job("serial_gpu_script", "-l gpu=1"),
    _job("pe_script", TWO),
    _job("pe_one_script", "-pe one 2"),
    _job("pe_uneven_script", "-pe fill 6"),
    _job("pe_one_host_script", "-pe smp 2"),
    _job("array_script", "-t 2-6:2", "DUMP task$SGE_TASK_ID"),
    _job("array_pe_script", f"-t 1-2 {TWO}", "DUMP task$SGE_TASK_ID"),
    _job("qrsh", TWO, SLAVES.format(option=""), within="qrsh -inherit for each slot"),
    _job("qrsh_V", TWO, SLAVES.format(option="-V"), within="qrsh -inherit -V for each slot"),
    _job("qrsh_one", "-pe one 2", SLAVES.format(option=""), within="qrsh -inherit for each slot"),
    _job("qrsh_one_V", "-pe one 2", SLAVES.format(option="-V"), within="qrsh -inherit -V for each slot"),
    _job("qrsh_uneven", "-pe fill 6", SLAVES.format(option=""), within="qrsh -inherit for each slot"),
    _job("leaked_script", f"-V {TWO}", leaked=True),
    _job("leaked_qrsh_V", f"-V {TWO}", SLAVES.format(option="-V"), leaked=True, within="qrsh -inherit -V"),
    _mpi("ompi", "mpirun", "OPENMPI DUMP", OPENMPI),
    _mpi("ompi_by_node", "mpirun --map-by node", "OPENMPI --map-by node DUMP", OPENMPI),
    _mpi("ompi_one_a_node", "mpirun -npernode 1", "OPENMPI -npernode 1 DUMP", OPENMPI),
    _mpi("hydra", "mpiexec.hydra", "HYDRA DUMP", HYDRA),
    _mpi("hydra_one_a_node", "mpiexec.hydra -ppn 1 -n 2", "HYDRA -ppn 1 -n 2 DUMP", HYDRA),
]

# Without -inherit, qrsh starts a job of its own: its command is no slave task.
INTERACTIVE = Scenario("qrsh_job", f"qrsh -now no {TWO}", f"qrsh -now no {TWO} DUMP", NO_RANK, "the command of the job")


def main() -> None:
    """Writes the recordings of all scenarios anew."""
    mpi = mpi_versions()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, GridEngineCluster(Path(folder), gpus=2) as cluster:
        version = cluster.run("qstat", "-help").stdout.splitlines()[0].replace("SGE", "Grid Engine")
        for submission in SUBMISSIONS:
            scenario = submission.scenario
            script, env = prepared(scenario, cluster.workdir), LEAKED if submission.leaked else None
            job = cluster.qsub(script, *submission.options.split(), env=env, timeout=400)
            print(f"{scenario.name}: {job.exit_code} {job.output}", file=sys.stderr)
            started = mpi.get(scenario.rank)
            source = f"{started} in {version}" if started else version
            print(*write(FOLDER, scenario, source, cluster.workdir, KEPT), sep="\n")
        cluster.run("sh", "-ec", prepared(INTERACTIVE, cluster.workdir), check=True)
        print(*write(FOLDER, INTERACTIVE, version, cluster.workdir, KEPT), sep="\n")


if __name__ == "__main__":
    main()
