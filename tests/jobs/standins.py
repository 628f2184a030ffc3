"""Stand-ins for programs of a cluster: they record their arguments and variables; launchers end with $CODE."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

STAND_IN = """#!/bin/bash
# A stand-in for $0.
name=$(basename "$0")
printf '%s\\0' "$@" > "$(mktemp "$RECORDS/$name.XXXXXX")"
env -0 > "$RECORDS/environment.$name"
case "$name $*" in
  "flux getattr size") echo 2 ;;
  "flux getattr jobid") echo f7 ;;
  "flux job id --to=dec f7") echo 7 ;;
  "flux --parent jobs "*) case $* in *queue*) echo "${QUEUE:-}" ;; esac ;;
  "flux job timeleft" | "bjobs "* | "squeue "*) echo "${LIMIT:-}" ;;
  "qstat -j "*) if [ -n "${LIMIT:-}" ]; then echo "hard resource_list:         gpu=1,h_rt=$LIMIT"; fi ;;
  "mpiexec --version") echo "$VERSION" ;;
  "qstat -f "*)
    if [ -n "${LIMIT:-}" ]; then echo "    Resource_List.walltime = $LIMIT"; fi
    printf '    %s\\n' 'Account_Name = my project' 'Resource_List.select = 2:ncpus=4' 'ctime = 1'
    printf '    %s\\n' "project = ${PROJECT:-_pbs_project_default}"
    ;;
  "module "*) ;;
  "qrsh "*)
    cat > "$(mktemp "$RECORDS/input.XXXXXX")"
    exit "$CODE"
    ;;
  "srun "* | "mpiexec "* | "jsrun "* | "blaunch "* | "flux run "*) exit "$CODE" ;;
esac
"""
LAUNCHERS = {"slurm": "srun", "pbs": "mpiexec", "lsf": "blaunch", "grid_engine": "qrsh", "flux": "flux"}
NAMES = {name.replace("_", "-"): program for name, program in LAUNCHERS.items()}


class Cluster:
    """Stand-ins on PATH, and the variables of a job with two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a 'folder'"
        self.records = folder / "records"
        self.image = self.folder / "an $(touch harm) image.sif"
        self.bin = folder / "bin"
        for path in (self.folder, self.records, self.bin):
            path.mkdir()
        self.image.touch()
        (folder / "nodes").write_text("h1\nh1\nh2\n")
        (folder / "pe").write_text("h1 2 main.q@h1 UNDEFINED\nh2 2 main.q@h2 UNDEFINED\n")
        self.add(
            *LAUNCHERS.values(), "apptainer", "singularity", "scontrol", "qsub", "qstat", "bjobs", "squeue", "module"
        )
        self.variables = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RECORDS": str(self.records),
            "VERSION": "HYDRA",
            "CODE": "0",
            "MUSTER_IMAGE": self.image.name,
        }
        self.job: Mapping[str, Mapping[str, str]] = {
            "slurm": {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "4"},
            "pbs": {
                "PBS_JOBID": "7.head",
                "PBS_ENVIRONMENT": "PBS_BATCH",
                "PBS_NODEFILE": str(folder / "nodes"),
                "PBS_O_WORKDIR": str(self.folder),
                "PBS_QUEUE": "workq",
                "PBS_JOBNAME": "muster",
            },
            "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2 4"},
            "grid-engine": {
                "JOB_ID": "7",
                "JOB_NAME": "muster",
                "SGE_TASK_ID": "undefined",
                "PE": "two",
                "NSLOTS": "4",
                "PE_HOSTFILE": str(folder / "pe"),
            },
            "flux": {},
        }

    def add(self, *names: str) -> None:
        """Puts stand-ins of these names on PATH."""
        for name in names:
            (self.bin / name).write_text(STAND_IN)
            (self.bin / name).chmod(0o755)

    def run(self, name: str, text: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs the script `text` in a job of the scheduler of the profile `name`; returns the completed process."""
        script = self.folder.parent / "script"
        script.write_text(text)
        env = {**self.variables, **self.job[name], **more}
        argv = ["bash", script, *arguments]
        return subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=240)

    def words(self, name: str) -> list[list[str]]:
        """The arguments of each call of the stand-in `name`, sorted."""
        calls = [path.read_bytes().decode() for path in self.records.glob(f"{name}.*")]
        return sorted(call.split("\0")[:-1] for call in calls)

    def environment(self, name: str) -> dict[str, str]:
        """The variables of the last call of the stand-in `name`."""
        lines = (self.records / f"environment.{name}").read_bytes().decode().split("\0")
        return dict(line.split("=", 1) for line in lines if line)
