"""The configuration files of the tests' Slurm."""

from collections.abc import Sequence
from pathlib import Path

LOGIN = "login"

SLURM_CONF = """
ClusterName=muster
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start again only when the credential of its last run has expired: by default 2 minutes.
AuthInfo=cred_expire={credential_lifetime_s}
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/{login}.log
SlurmdLogFile={folder}/log/%n.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
# No plugin here may need cgroups: fake hosts have none, so that none can be left behind.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
# Nodes have the CPUs that are written below, whatever the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Without a command, salloc opens a shell on the first node, as most sites have it.
LaunchParameters=use_interactive_step
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# Slurm's own default: what hears TERM has the time to write a checkpoint.
KillWait=30
InactiveLimit=0
MinJobAge=3600
ReturnToService=2
# Two busy cores carry the whole cluster: patience here, deadlines in the tests.
MessageTimeout=30
BatchStartTimeout=60
SlurmdTimeout=30
PropagateResourceLimits=NONE
{gres_types}
NodeName={nodes} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 {gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
# As `main` in the eyes of `hi`, but with time to end: only then is TERM sent to the steps alone.
PartitionName=spare Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=hi Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

CGROUP_CONF = {(22, 5): "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n", (23, 11): "CgroupPlugin=disabled\n"}
"""The cgroup.conf that keeps Slurm from using cgroups, by the first version for which it is right."""

# Stand-ins for GPUs: device files with the numbers of /dev/null. Slurm treats them as GPUs: it counts them, gives them
# to jobs and sets CUDA_VISIBLE_DEVICES.
DEVICES_SCRIPT = """
mkdir /run/gpus
for number in $(seq 0 {last}); do mknod -m 666 /run/gpus/nvidia$number c 1 3; done
"""

# munged goes to the background when it is ready, and refuses a key in a folder that others may write to.
DAEMON_SCRIPT = """
mkdir -m 755 /run/munge
install -m 400 {folder}/munge.key /run/munge/key
munged --key-file=/run/munge/key --log-file=/run/munge/log --pid-file=/run/munge/pid --seed-file=/run/munge/seed
{devices}
exec {daemon}
"""


def write_config(
    folder: Path,
    nodes: Sequence[str],
    *,
    gpus: int,
    cpus: int,
    credential_lifetime_s: int,
    version: tuple[int, int],
) -> None:
    """Writes Slurm's configuration to `folder/etc`; the keywords are those of `SlurmCluster`."""
    settings = SLURM_CONF.format(
        login=LOGIN,
        folder=folder,
        nodes=",".join(nodes),
        cpus=cpus,
        credential_lifetime_s=credential_lifetime_s,
        gres_types="GresTypes=gpu" if gpus else "",
        gres=f"Gres=gpu:{gpus}" if gpus else "",
    )
    (folder / "etc" / "slurm.conf").write_text(settings)
    if gpus:
        devices = f"AutoDetect=off\nName=gpu File=/run/gpus/nvidia[0-{gpus - 1}]\n"
        (folder / "etc" / "gres.conf").write_text(devices)
    known = [since for since in CGROUP_CONF if since <= version]
    (folder / "etc" / "cgroup.conf").write_text(CGROUP_CONF[max(known, default=min(CGROUP_CONF))])


def daemon_script(folder: Path, host: str, *, gpus: int) -> str:
    """The shell lines that start a host's daemons; the last one becomes the daemon itself."""
    if host == LOGIN:
        return DAEMON_SCRIPT.format(folder=folder, devices="", daemon="slurmctld -D -i")
    devices = DEVICES_SCRIPT.format(last=gpus - 1) if gpus else ""
    return DAEMON_SCRIPT.format(folder=folder, devices=devices, daemon="slurmd -D")
