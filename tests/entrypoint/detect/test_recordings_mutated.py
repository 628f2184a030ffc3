"""Recordings with a variable missing or faulty, or with another family's added: the right answer, or a refusal."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from tests.entrypoint import recorded
from tests.entrypoint.recorded import Recording

# Variables that schedulers and launchers set. A user's settings (MUSTER_, --node-rank) are obeyed, right or wrong.
FAMILIES = re.compile(
    r"(SLURM|PBS|LSB|LSF|JSM|FLUX|PALS|PMI|PMIX|MPI|MPIR|OMPI|MV2|SGE|KUBERNETES|PET|VC|VK|CUDA|MASTER|JOB|PE|NHOSTS|NSLOTS|"
    r"NCPUS|RANK|WORLD|RESTARTED|TMPDIR)(_|$)"
)

# What only one variable shows can't be checked: a wrong value of it that fits all others is believed.
SOLE_WITNESSES = {
    # Without a list of hosts only the launcher's size shows the number of nodes.
    "mpich_ssh": {"PMI_SIZE"},
    "intel_mpi": {"PMI_SIZE"},
    "intel_mpi_ssh": {"PMI_SIZE"},
    "mvapich_ssh": {"MV2_COMM_WORLD_SIZE"},
    "pals_hidden": {"PMI_SIZE"},
    "kubeflow_pytorchjob_old": {"WORLD_SIZE"},
    # Where nodes have different numbers of processes and the file is gone, the other node refuses, not this one.
    "pals_file_uneven": {"PALS_APINFO", "file PALS_APINFO"},
    # Another rank fits ranks that are dealt in turns.
    "pbs_mpi_hydra-tmrsh": {"PMI_RANK"},
    # A shorter list is the list of a smaller job.
    "pbs_cgroupshook_gpu1_script": {"file PBS_NODEFILE"},
    "pbs_interactive": {"file PBS_NODEFILE"},
    "pbs_scatter2x2_script": {"file PBS_NODEFILE"},
    "pbs_shape_a_nompiprocs": {"file PBS_NODEFILE"},
    "pbs_shape_b_nodesppn": {"file PBS_NODEFILE"},
    "flux_in_pbs_instance-script": {"file PBS_NODEFILE"},
    "flux_in_pals_shell": {"file PBS_NODEFILE"},
    # Host names: a wrong one does not resolve, and the launch reports that.
    "kubeflow_trainjob": {"PET_MASTER_ADDR", "PET_NNODES"},
    "jobset_processes": {"JOB_COMPLETION_INDEX", "MASTER_ADDR"},
    "leader_worker_set": {"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"},
    "volcano_pytorch": {"VC_MASTER_HOSTS", "VC_WORKER_HOSTS"},
    "volcano_workers": {"VC_WORKER_HOSTS"},
    # The only variable that shows this kind of launch.
    "indexed_job": {"JOB_COMPLETION_INDEX"},
    "flux_instance": {"FLUX_URI"},
    "flux_in_slurm_shell": {"FLUX_URI"},
    "flux_operator_shell": {"FLUX_URI", "JOB_COMPLETION_INDEX"},
    "arbitrary": {"SLURM_DISTRIBUTION"},
}


def values(value: str) -> list[str | None]:
    """Faulty values of a variable: missing, empty, doubled, no number, off by one, a list."""
    changed: list[str | None] = [None, "", value + value, "x", "-1", "99", "9" * 5000, "$(reboot)", f"{value},9"]
    return [*changed, str(int(value) + 1)] if value.isdecimal() else changed


def mutations(recording: Recording) -> Iterator[tuple[str, str | None, Environment]]:
    """The recording with one variable changed, or the content of one file."""
    env = recording.environment
    for name, value in env.items():
        if not FAMILIES.match(name):
            continue
        for other in values(value):
            variables = {key: text for key, text in env.items() if key != name}
            yield name, other, replace(env, variables=variables if other is None else {**variables, name: other})
    for name, content in env.files.items():
        for other in (
            "",
            "\n",
            "x y z\n",
            f"x {'9' * 5000} y z\n",
            content + content,
            content[: len(content) // 2],
            "\0\n",
        ):
            yield f"file {name}", other, replace(env, files={**env.files, name: other})
        yield f"file {name}", None, replace(env, files={})


def same_world(found: Allocation, truth: Allocation) -> bool:
    """Whether both put this process at the same place of the same world."""
    names = ["num_nodes", "node_rank", "tasks_on_node", "mode", "local_rank"]
    names += ["rank", "world_size"] if truth.mode == "worker" else []
    same = all(getattr(found, name) == getattr(truth, name) for name in names if name != "mode")
    # With one GPU an agent of one rank becomes a single process: the same world. Hosts may be lost, and then unknown.
    return same and (found.mode == "worker") == (truth.mode == "worker") and found.hosts in (truth.hosts, ())


@pytest.mark.parametrize("recording", recorded.TASKS, ids=str)
def test_one_variable_less_or_worse_never_gives_another_world(recording: Recording) -> None:
    truth = recorded.detect(recording.environment)
    believed = SOLE_WITNESSES.get(recording.scenario, set())
    for name, value, changed in mutations(recording):
        # A missing one does no harm, except for a file that only some of the nodes need.
        if name in believed and (value is not None or "PALS" in name):
            continue
        found = recorded.find(changed)
        assert found is None or same_world(found, truth), (name, value, found)


@pytest.mark.parametrize("recording", [*recorded.SHELLS, *recorded.REFUSED], ids=str)
def test_one_variable_less_or_worse_never_lets_a_refused_process_start(recording: Recording) -> None:
    believed = SOLE_WITNESSES.get(recording.scenario, set())
    changes = [change for change in mutations(recording) if change[0] not in believed]
    started = [(name, value) for name, value, changed in changes if recorded.find(changed)]
    assert started == []


# The variables of a whole family, left over from a process on another host: the shell that submitted the job.
DONORS = {
    "slurm": ("slurm", "b_srun_N2_1per.node02.1"),
    "slurm_two_a_node": ("slurm", "c3_srun_N2_2per_pmix.node02.3"),
    "pbs": ("pbs", "pbs_scatter2x2_pbsdsh.pbsn2.task20000001"),
    "grid_engine": ("grid_engine", "pe_two.qrsh_V.node02"),
    "lsf": ("documented", "lsf_blaunch.hostb.1"),
    "jsrun": ("documented", "lsf_jsrun.h36n18.3"),
    "flux": ("flux", "flux_in_pbs_run-N2n4g1.pbsn2.task3"),
    "openmpi": ("mpi", "ompi_ssh.node02.3"),
    "hydra": ("mpi", "mpich_ssh.node02.2"),
    "pals": ("documented", "pals_hidden.x3001c0s13b1n0.3"),
    "kubernetes": ("documented", "kubeflow_pytorchjob.mnist-worker-1.2"),
}
# Where nothing shows a job, a whole family's variables look like real ones. So do those of jsrun in a job of LSF whose
# hosts and slots they fit, and those of Flux in an indexed Job, such as the Flux Operator's pods.
WITHOUT_EVIDENCE = (
    "pod_alone", "flux_instance", "flux_operator_shell", "flux_in_pbs_instance-script", "flux_in_pals_shell",
    "flux_in_slurm_shell", "indexed_job", "lsf_blaunch_slots", "mpijob_launcher",
)  # fmt: skip
# The recordings of Flux and PALS are of jobs of PBS, and have its variables too.
ONLY = {"flux": re.compile("FLUX_"), "pals": re.compile("PALS_|PMI_")}


def donated(name: str) -> dict[str, str]:
    folder, stem = DONORS[name]
    env = next(found.environment for found in recorded.load(folder) if found.file.stem == stem)
    allowed = ONLY.get(name, FAMILIES)
    hosts = re.compile("node0[12]|node\\[01-02\\]|pbsn[12]|host[ab]|h36n(?:03|18)|batch2|x3001c0s13b[01]n0")
    kept = {key: value for key, value in env.items() if allowed.match(key) and not key.startswith("CUDA")}
    return {key: hosts.sub("other7", value) if "HOST" in key or "NODE" in key else value for key, value in kept.items()}


@pytest.mark.parametrize("family", DONORS)
def test_another_familys_variables_never_give_another_world(family: str) -> None:
    leaked = donated(family)
    for recording in recorded.TASKS:
        truth = recorded.detect(recording.environment)
        if recording.scenario in WITHOUT_EVIDENCE:
            continue
        # A job sets its own variables when it starts: only those that it doesn't set are left over.
        added = {**leaked, **recording.environment.variables}
        found = recorded.find(replace(recording.environment, variables=added))
        assert found is None or same_world(found, truth), (str(recording), found)


@pytest.mark.parametrize("family", DONORS)
def test_another_familys_variables_never_let_a_refused_process_start(family: str) -> None:
    leaked = donated(family)
    for recording in (*recorded.SHELLS, *recorded.REFUSED):
        added = {**leaked, **recording.environment.variables}
        found = recorded.find(replace(recording.environment, variables=added))
        assert found is None or recording.scenario in WITHOUT_EVIDENCE, (str(recording), found)


def test_no_environment_gives_a_traceback_takes_long_or_reaches_a_shell_or_terminal() -> None:
    """A sample; `python -m tests.entrypoint.fuzz` makes 20,000."""
    from tests.entrypoint import fuzz

    wrong, ends, _ = fuzz.run(400, seed=7)
    assert wrong == []
    # Some are refused, and some are answered.
    assert min(ends["answered"], ends["refused"]) > 100
