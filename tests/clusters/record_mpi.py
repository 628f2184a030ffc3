"""Writes tests/recordings/mpi_own: the environments of real ranks of Open MPI and MPICH, and of jobs inside jobs.

Run it as root from the repository: `python -m tests.clusters.record_mpi`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clusters.mpi import MpiHosts, hydra_command, openmpi_command
from tests.clusters.record import slurm_version
from tests.clusters.recording import RECORDINGS, Scenario, prepared, write
from tests.clusters.requirements import program
from tests.clusters.slurm import SlurmCluster

FOLDER = RECORDINGS / "mpi_own"
KEPT = (
    *("SLURM", "SRUN_", "PMI", "OMPI_", "MPI", "HYDRA", "HYDI", "MASTER_"),
    *("CUDA_VISIBLE_DEVICES", "HOSTNAME$", "TMPDIR$"),
)
OPENMPI, HYDRA = "OMPI_COMM_WORLD_RANK", "PMI_RANK"


def _openmpi(name: str, options: str) -> Scenario:
    return Scenario(f"ompi_{name}", f"mpirun {options}", f"OPENMPI {options} DUMP", rank=OPENMPI)


def _hydra(name: str, options: str) -> Scenario:
    return Scenario(f"hydra_{name}", f"mpiexec.hydra {options}", f"HYDRA {options} DUMP", rank=HYDRA)


BY_SSH = [
    _openmpi("by_node", "--host node01:2,node02:2 --map-by node"),
    _openmpi("uneven", "--host node01:1,node02:3"),
    _openmpi("uneven_by_node", "--host node01:1,node02:3 --map-by node"),
    _openmpi("one_a_node", "--host node01:1,node02:1"),
    _openmpi("reversed", "--host node02:2,node01:2"),
    _openmpi("one_host", "--host node01:2"),
    _openmpi("one_rank", "--host node01:1"),
    _openmpi("master", "--host node01:2,node02:2 -x MASTER_ADDR=node01 -x MASTER_PORT=29500"),
    Scenario(
        "ompi_two_programs",
        "mpirun --host node01:1 -np 1 A : --host node02:2 -np 2 B",
        "OPENMPI --host node01:1 -np 1 DUMP : --host node02:2 -np 2 DUMP",
        rank=OPENMPI,
    ),
    _openmpi("agent", "--host node01:2,node02:2 --mca plm_rsh_agent AGENT"),
    _hydra("ppn1", "-hosts node01,node02 -ppn 1 -n 4"),
    _hydra("ppn2", "-hosts node01,node02 -ppn 2 -n 4"),
    _hydra("uneven", "-hosts node01:1,node02:2 -n 3"),
    _hydra("one_a_node", "-hosts node01,node02 -ppn 1 -n 2"),
    _hydra("reversed", "-hosts node02:2,node01:2 -n 4"),
    _hydra("interleaved", "-hosts node01:1,node02:1,node01:1 -n 3"),
    _hydra("one_host", "-hosts node01 -n 2"),
    _hydra("master", "-hosts node01,node02 -ppn 2 -n 4 -genv MASTER_ADDR node01 -genv MASTER_PORT 29500"),
    _hydra("agent", "-hosts node01,node02 -ppn 2 -n 4 -launcher ssh -launcher-exec AGENT"),
]

TWO_BY_TWO = "-N2 --ntasks-per-node=2"
# A job that is submitted from a task of another job has that job's variables, by --export=ALL, the default.
INNER_STEP = f"sbatch --wait {TWO_BY_TWO} --wrap 'srun DUMP'"
INNER_SCRIPT = f"sbatch --wait {TWO_BY_TWO} --wrap 'DUMP'"


def _within(name: str, title: str, outer: str, inner: str, rank: str = "SLURM_PROCID") -> Scenario:
    """A scenario in which a process of the command `outer` runs the shell lines `inner`; `title` describes both."""
    return Scenario(name, title, f"{outer} sh -c {shlex.quote(inner)}", rank=rank)


IN_SLURM = [
    Scenario("ompi_in_sbatch", f"mpirun inside sbatch {TWO_BY_TWO}", "SBATCH 'OPENMPI DUMP'", rank=OPENMPI),
    Scenario(
        "ompi_in_sbatch_by_node",
        f"mpirun --map-by node inside sbatch {TWO_BY_TWO}",
        "SBATCH 'OPENMPI --map-by node DUMP'",
        rank=OPENMPI,
    ),
    Scenario(
        "ompi_in_salloc_one_a_node",
        f"mpirun -npernode 1 inside salloc {TWO_BY_TWO}",
        "SALLOC OPENMPI -npernode 1 DUMP",
        rank=OPENMPI,
    ),
    Scenario("hydra_in_salloc", f"mpiexec.hydra inside salloc {TWO_BY_TWO}", "SALLOC HYDRA DUMP", rank=HYDRA),
    Scenario("hydra_in_sbatch", f"mpiexec.hydra inside sbatch {TWO_BY_TWO}", "SBATCH 'HYDRA DUMP'", rank=HYDRA),
    Scenario(
        "hydra_in_salloc_ppn1",
        f"mpiexec.hydra -ppn 1 -n 4 inside salloc {TWO_BY_TWO}",
        "SALLOC HYDRA -ppn 1 -n 4 DUMP",
        rank=HYDRA,
    ),
    Scenario(
        "hydra_in_salloc_one_a_node",
        f"mpiexec.hydra -ppn 1 -n 2 inside salloc {TWO_BY_TWO}",
        "SALLOC HYDRA -ppn 1 -n 2 DUMP",
        rank=HYDRA,
    ),
    _within(
        "srun_in_task",
        "srun --overlap -N2 --ntasks-per-node=2 -n4 --export=ALL inside a task of srun -N1 -n1 of the same job",
        "SALLOC srun --overlap -N1 -n1 -w node02",
        f"srun --overlap {TWO_BY_TWO} -n4 --export=ALL DUMP",
    ),
    _within(
        "srun_of_new_job_in_task",
        f"srun {TWO_BY_TWO} -n4 --export=ALL without SLURM_JOB_ID inside a task of another job",
        "srun -N1 -n1 -w node02",
        f"env -u SLURM_JOB_ID -u SLURM_JOBID srun {TWO_BY_TWO} -n4 --export=ALL DUMP",
    ),
    _within(
        "srun_in_sbatch_in_task",
        f"srun inside sbatch {TWO_BY_TWO}, submitted from a task of another job",
        "srun -N1 -n1 -w node02",
        INNER_STEP,
    ),
    _within(
        "sbatch_in_task",
        f"the script of sbatch {TWO_BY_TWO}, submitted from a task of another job",
        "srun -N1 -n1 -w node02",
        INNER_SCRIPT,
    ),
    # The task's variables also fit the new job. They can't be its own, because the job's script is not a task.
    _within(
        "sbatch_in_task_of_same_shape",
        "the script of sbatch -N2 --ntasks-per-node=1, submitted from task 1 of srun with these options",
        "srun -N2 --ntasks-per-node=1",
        "[ $SLURM_PROCID = 0 ] || sbatch --wait -N2 --ntasks-per-node=1 --wrap 'DUMP'",
    ),
    _within(
        "srun_in_sbatch_in_ompi",
        f"srun inside sbatch {TWO_BY_TWO}, submitted from a rank of mpirun in another job",
        "salloc -N1 OPENMPI -np 1",
        INNER_STEP,
    ),
    _within(
        "sbatch_in_ompi",
        f"the script of sbatch {TWO_BY_TWO}, submitted from a rank of mpirun in another job",
        "salloc -N1 OPENMPI -np 1",
        INNER_SCRIPT,
    ),
    _within(
        "srun_in_sbatch_in_hydra",
        f"srun inside sbatch {TWO_BY_TWO}, submitted from a rank of mpiexec.hydra in another job",
        "salloc -N1 HYDRA -n 1",
        INNER_STEP,
    ),
    _within(
        "sbatch_in_hydra",
        f"the script of sbatch {TWO_BY_TWO}, submitted from a rank of mpiexec.hydra in another job",
        "salloc -N1 HYDRA -n 1",
        INNER_SCRIPT,
    ),
]


def commands(scenario: Scenario, agent: str = "ssh") -> Scenario:
    """The scenario, with command lines in the place of their names (OPENMPI, SALLOC...) in its script."""
    words = {
        "OPENMPI": shlex.join(openmpi_command([])),
        "HYDRA": shlex.join(hydra_command([])),
        "SALLOC": f"salloc {TWO_BY_TWO}",
        "SBATCH": f"sbatch --wait {TWO_BY_TWO} --wrap",
        "AGENT": agent,
    }
    script = re.sub(r"\b(OPENMPI|HYDRA|SALLOC|SBATCH|AGENT)\b", lambda found: words[found[0]], scenario.script)
    return Scenario(scenario.name, scenario.title, script, scenario.rank, scenario.shell)


def mpi_versions() -> dict[str, str]:
    """The name and version of each MPI, by its variable for the rank."""
    tell = {("Open MPI", OPENMPI): ["mpirun.openmpi", "--version"], ("MPICH", HYDRA): ["mpiexec.hydra", "-info"]}
    versions = {}
    for (name, rank), (command, *options) in tell.items():
        argv = [program(command), *options]
        said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
        versions[rank] = f"{name} {re.findall(r'[0-9]+[.][0-9.]+', said)[0]}"
    return versions


def main() -> None:
    """Writes the recordings of all scenarios anew."""
    versions, slurm = mpi_versions(), slurm_version()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, MpiHosts(Path(folder)) as hosts:
        for scenario in BY_SSH:
            script = prepared(commands(scenario, str(hosts.agent)), hosts.workdir)
            # From /run, which any machine has.
            hosts.run("sh", "-ec", script, cwd=Path("/run"), check=True)
            print(*write(FOLDER, scenario, versions[scenario.rank], hosts.workdir, KEPT), sep="\n")
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(Path(folder), ["node01", "node02"], gpus=2) as cluster:
        for scenario in IN_SLURM:
            script = prepared(commands(scenario), cluster.workdir)
            done = cluster.run("sh", "-ec", script, cwd=Path("/run"), check=True)
            print(f"{scenario.name}: {done.stdout}{done.stderr}", file=sys.stderr)
            started = versions.get(scenario.rank)
            source = f"{started} in {slurm}" if started else slurm
            print(*write(FOLDER, scenario, source, cluster.workdir, KEPT), sep="\n")
            cluster.idle()


if __name__ == "__main__":
    main()
