"""The configuration files of the tests' Grid Engine."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

LOGIN = "login"
QUEUE = "main.q"

# Debian's paths. All hosts share ROOT; each host has a SPOOL of its own, as on clusters whose nodes have local disks:
# a slave task can't read the files that Grid Engine keeps for the job on its first host.
ROOT = Path("/var/lib/gridengine")
SPOOL = Path("/var/spool/gridengine")
PROGRAMS = Path("/usr/lib/gridengine")
RESOURCES = Path("/usr/share/gridengine/util/resources")
DEFAULTS = Path("/usr/share/gridengine/default-configuration")

PARALLEL_ENVIRONMENTS = {"one": "1", "two": "2", "smp": "$pe_slots", "fill": "$fill_up", "round": "$round_robin"}
"""Name to allocation rule: how many slots a host gives to a job."""

BOOTSTRAP = {
    "admin_user": "none",
    "default_domain": "none",
    "ignore_fqdn": "false",
    "spooling_method": "berkeleydb",
    "spooling_lib": "libspoolb",
    "spooling_params": f"{SPOOL}/database",
    "binary_path": "/usr/sbin",
    "qmaster_spool_dir": f"{SPOOL}/qmaster",
    "security_mode": "none",
    "listener_threads": "2",
    "worker_threads": "2",
    "scheduler_threads": "1",
}

# What differs from the package's configuration, see sge_conf(5): jobs run as root and with the environment of a
# login instead of the daemon's; loads and accounts are written at once, so that tests needn't wait for them.
CLUSTER = {
    "execd_spool_dir": f"{SPOOL}/execd",
    "min_uid": "0",
    "min_gid": "0",
    "mailer": "/bin/true",
    "load_report_time": "00:00:01",
    "execd_params": "INHERIT_ENV=false",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
    "joblog=false sharelog=00:00:00",
}

# What differs from a new scheduler's, see sched_conf(5): it considers a job within a second of its submission.
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}

# See queue_conf(5): every attribute has to be there.
QUEUE_ATTRIBUTES = {
    "seq_no": "0",
    "nsuspend": "1",
    "suspend_interval": "00:05:00",
    "priority": "0",
    "min_cpu_interval": "00:05:00",
    "processors": "UNDEFINED",
    "qtype": "BATCH INTERACTIVE",
    "pe_list": " ".join(PARALLEL_ENVIRONMENTS),
    "rerun": "FALSE",
    "tmpdir": "/run/scratch",
    "shell": "/bin/bash",
    "shell_start_mode": "unix_behavior",
    "notify": "00:00:02",
    "initial_state": "default",
}
QUEUE_HAS_NO = (
    *("load_thresholds", "suspend_thresholds", "ckpt_list", "prolog", "epilog", "starter_method", "suspend_method"),
    *("resume_method", "terminate_method", "owner_list", "user_lists", "xuser_lists", "subordinate_list"),
    *("complex_values", "projects", "xprojects", "calendar"),
)
LIMITS = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")

ENVIRONMENT_ATTRIBUTES = {
    "slots": "9999",
    "user_lists": "NONE",
    "xuser_lists": "NONE",
    "start_proc_args": "NONE",
    "stop_proc_args": "NONE",
    # For `qrsh -inherit`: Grid Engine starts and ends the slave tasks, and knows that they are the job's.
    "control_slaves": "TRUE",
    "job_is_first_task": "FALSE",
    "urgency_slots": "min",
    "accounting_summary": "FALSE",
    "qsort_args": "NONE",
}

# Grid Engine counts GPUs as it counts any resource: it names no device, and sets no CUDA_VISIBLE_DEVICES.
GPU_RESOURCE = {
    "name": "gpu",
    "shortcut": "gpu",
    "type": "INT",
    "relop": "<=",
    "requestable": "YES",
    "consumable": "YES",
    "default": "0",
    "urgency": "0",
}

HOST_HAS_NO = (
    *("load_scaling", "user_lists", "xuser_lists", "projects", "xprojects", "usage_scaling", "report_variables"),
)

# mount -n: without it, mount(8) leaves the folder /run/mount on the machine. The daemons go to the background:
# the variable that keeps them in the foreground, SGE_ND, would be in the environment of slave tasks.
HOST_SCRIPT = f"""
mount -n --bind {{folder}}/spool/{{host}} /var/spool
mkdir -m 1777 /run/scratch
cd {{folder}}/config
export SGE_ROOT={ROOT} SGE_CELL=default
"""
EXECD_SCRIPT = "sge_execd\n"
QMASTER_SCRIPT = f"""
fill() {{ {PROGRAMS}/spooldefaults "$@"; }}
{PROGRAMS}/spoolinit berkeleydb libspoolb {SPOOL}/database init
fill configuration cluster
fill complexes {RESOURCES}/centry
[ ! -d resources ] || fill complexes resources
fill usersets {RESOURCES}/usersets
fill managers root
fill adminhosts hosts
fill submithosts hosts
fill exechosts nodes
fill pes environments
sge_qmaster
"""


def write_config(folder: Path, nodes: Sequence[str], *, slots: int, gpus: int) -> None:
    """Writes the files with which a cluster starts to `folder`: `root`, `config` and `spool`."""
    shutil.copytree(ROOT, folder / "root", symlinks=True, ignore=shutil.ignore_patterns("default"))
    common, config = folder / "root" / "default" / "common", folder / "config"
    common.mkdir(parents=True)
    (common / "act_qmaster").write_text(f"{LOGIN}\n")
    (common / "cluster_name").write_text("muster\n")
    _write(common / "bootstrap", BOOTSTRAP)
    shipped = [line.split(maxsplit=1) for line in DEFAULTS.read_text().splitlines() if line and line[0] != "#"]
    _write(config / "cluster", {name: value.strip() for name, value in shipped} | CLUSTER)
    if gpus:
        _write(config / "resources" / "gpu", GPU_RESOURCE)
    for name, rule in PARALLEL_ENVIRONMENTS.items():
        attributes = {"pe_name": name, "allocation_rule": rule, **ENVIRONMENT_ATTRIBUTES}
        _write(config / "environments" / name, attributes)
    none = dict.fromkeys(QUEUE_HAS_NO, "NONE")
    unlimited = {f"{kind}_{of}": "INFINITY" for kind in "sh" for of in LIMITS}
    queue = {"qname": QUEUE, "hostlist": " ".join(nodes), "slots": str(slots)}
    _write(config / "queue", {**queue, **QUEUE_ATTRIBUTES, **none, **unlimited})
    for host in (LOGIN, *nodes):
        _write(config / "hosts" / host, {"hostname": host})
        for name in ("qmaster", "execd", "database"):
            (folder / "spool" / host / SPOOL.name / name).mkdir(parents=True)
    for node in nodes:
        counted = {"complex_values": f"gpu={gpus}" if gpus else "NONE"}
        _write(config / "nodes" / node, {"hostname": node, **counted, **dict.fromkeys(HOST_HAS_NO, "NONE")})


def scheduler_config(printed: str) -> str:
    """The scheduler's configuration, as `qconf -ssconf` printed it, with the values of SCHEDULER."""
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    return "".join(f"{name} {SCHEDULER.get(name, value)}\n" for name, value in lines)


def daemon_script(folder: Path, host: str) -> str:
    """The shell lines that start a host's daemon; they end when the daemon is in the background."""
    return HOST_SCRIPT.format(folder=folder, host=host) + (QMASTER_SCRIPT if host == LOGIN else EXECD_SCRIPT)


def _write(path: Path, attributes: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name} {value}\n" for name, value in attributes.items()))
