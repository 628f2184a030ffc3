"""The shape of a profile: what may stand in jobs/sites/SITE.toml and jobs/fabrics/FABRIC.toml.

Each value tells where it was read. What nobody could find out is left out: it is found on the spot, and listed as
unknown.
"""

from datetime import date
from typing import Generic, Literal, TypeVar

import msgspec

Status = Literal["unverified", "documented", "verified"]
"""unverified: nothing about containers was found; documented: the site's own words; verified: seen to work there."""

Scheduler = Literal["slurm", "pbs", "lsf", "grid_engine", "flux", "kubernetes"]

T = TypeVar("T")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of which every key is known: a misspelt one is an error."""


class Source(_Table, frozen=True):
    """Where something was read: `url`, and the day on which it was `read`."""

    url: str
    read: date


class When(_Table, frozen=True):
    """A condition; all that is given has to hold.

    Attributes:
        nodes: of the job: ">1", "1", ">=64".
        gpu: part of the GPU's name, as nvidia-smi has it: "GH200".
        nccl: versions of NCCL: ">=2.27,<2.28".
    """

    nodes: str | None = None
    gpu: str | None = None
    nccl: str | None = None


class Fact(_Table, Generic[T], frozen=True):
    """A value, the key in `sources` of where it was read, and when it holds."""

    value: T
    source: str
    when: When | None = None
    note: str = ""


Words = Fact[tuple[str, ...]]
Text = Fact[str]
Number = Fact[int]


class Recognise(_Table, frozen=True):
    """What tells that this is the site: one of the three is enough. Patterns as in `fnmatch`, of whole names.

    These keys stand before a profile's first table: `recognise.hosts = {value = ["jwb*"], source = "docs"}`.

    Attributes:
        cluster: of the scheduler's name for the cluster: SLURM_CLUSTER_NAME, SGE_CLUSTER_NAME.
        hosts: of the host's own name, with or without its domain.
        variables: variables that the site sets, with patterns of their values; all of them have to match.
    """

    cluster: Words | None = None
    hosts: Words | None = None
    variables: Fact[dict[str, str]] | None = None


class Nodes(_Table, frozen=True):
    """What a node has: GPUs and CPU cores that a job may use, and the memory to ask for in GiB."""

    gpus: Number | None = None
    gpu: Text | None = None
    cores: Number | None = None
    memory_gib: Number | None = None


class Launch(_Table, frozen=True):
    """How a job is asked for and started.

    Attributes:
        partition: Slurm's partition, or the queue of the others.
        account: whether a job has to name an account (a project).
        directives: further lines for the head of the script, without their `#SBATCH`.
        flags: further options of the launcher (srun, mpiexec, jsrun, flux run).
        launcher: where it is not the scheduler's own: mpiexec, jsrun, blaunch.
    """

    partition: Text | None = None
    account: Fact[bool] | None = None
    directives: Words | None = None
    flags: Words | None = None
    launcher: Text | None = None


class Network(_Table, frozen=True):
    """What a host's fabric address has after its name, and the interfaces for NCCL and gloo, by prefix."""

    address_suffix: Text | None = None
    interface: Text | None = None


class Container(_Table, frozen=True):
    """How a container is started there.

    Attributes:
        command: apptainer, singularity, podman-hpc...
        modules: what `module load` needs for it.
        options: further options of `exec`.
        binds: further folders that it has to see.
    """

    command: Text | None = None
    modules: Words | None = None
    options: Words | None = None
    binds: Words | None = None


class Storage(_Table, frozen=True):
    """Folders, as a shell reads them ($SCRATCH/...): for runs, on the node's own disk; and hints for people."""

    scratch: Text | None = None
    node_local: Text | None = None
    hints: Words | None = None


class Libraries(_Table, frozen=True):
    """The host's libraries that a fabric needs.

    Attributes:
        plugins: file names of NCCL's network plugin, the best first.
        roots: sonames that are needed whether or not something names them.
        search: folders of the host, before those that its loader looks in; `*` allowed.
        host_wins: sonames that have to be the host's though the image has them too.
        sets: sonames and folders that come all from the host, or all from the image.
        files: further files and folders of the host, at their own place in the container.
    """

    plugins: Words | None = None
    roots: Words | None = None
    search: Words | None = None
    host_wins: Words | None = None
    sets: Fact[tuple[tuple[str, ...], ...]] | None = None
    files: Words | None = None


class Devices(_Table, frozen=True):
    """Device files and folders of the host that a container needs, `*` allowed.

    Attributes:
        recognise: one of them tells that this host has the fabric.
        needed: what docker and podman have to be given, as far as it is there.
        folders: folders to be bound, as far as they are there.
    """

    recognise: Words | None = None
    needed: Words | None = None
    folders: Words | None = None


class Fabric(_Table, frozen=True):
    """A fabric's profile.

    Attributes:
        title: its name for people.
        is_rdma: whether TCP in its place would be a silent fall back.
        sources: by key.
        net: NCCL_NET's value on several nodes, where it is not the plugin's own name.
        variables: by name.
    """

    title: str
    status: Status
    is_rdma: bool
    sources: dict[str, Source] = {}
    net: Text | None = None
    devices: Devices = Devices()
    libraries: Libraries = Libraries()
    variables: dict[str, Text] = {}


class Site(_Table, frozen=True):
    """A site's profile.

    Attributes:
        title: the system's name for people.
        centre: whose it is; empty for the generic ones.
        scheduler: whose script is rendered.
        status: see `Status`.
        extends: the fabric's profile; None leaves it to detection.
        refused: why this image does not run there at all; None where it may.
        documentation: where the centre describes it.
        contact: its help desk.
        caches: TORCH_HOME, HF_HOME...: folders as a shell reads them.
        modules: lines for `module`, such as "load cuda".
        variables: by name; these win over the fabric's.
        libraries: what is set here takes the place of the fabric's.
    """

    title: str
    scheduler: Scheduler
    status: Status
    centre: str = ""
    extends: str | None = None
    refused: Text | None = None
    documentation: str | None = None
    contact: Text | None = None
    sources: dict[str, Source] = {}
    recognise: Recognise = Recognise()
    nodes: Nodes = Nodes()
    launch: Launch = Launch()
    network: Network = Network()
    container: Container = Container()
    storage: Storage = Storage()
    libraries: Libraries = Libraries()
    caches: dict[str, Text] = {}
    modules: Words | None = None
    variables: dict[str, Text] = {}
