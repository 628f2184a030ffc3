"""A profile and a wanted job -> a manifest for Kubernetes."""

from dataclasses import dataclass

from entrypoint.jobs import kubernetes, quoting
from entrypoint.jobs.context import made_by
from entrypoint.jobs.kubernetes import KINDS, Kind, Pods
from entrypoint.jobs.wanted import IMAGE, Wanted
from entrypoint.sites.conditions import Context, holds, resolve
from entrypoint.sites.schema import Site
from train.errors import MusterError

DEFAULT_KIND: Kind = "job"
"""What a cluster needs nothing installed for."""
_NO_PODS = Pods(image="", arguments=())


@dataclass(frozen=True, kw_only=True)
class Further:
    """What only a manifest can be asked for; None is the default of `Pods`.

    Attributes:
        claim: as in `Pods`.
        shm: the size of /dev/shm.
        devices: resources of each pod: rdma/hca_shared_devices_a=1.
        uid: as in `Pods`.
        restarts: as in `Pods`.
    """

    claim: str | None = None
    shm: str | None = None
    devices: tuple[str, ...] = ()
    uid: int | None = None
    restarts: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """As they are typed."""
        options = {"--claim": self.claim, "--shm": self.shm, "--uid": self.uid, "--restarts": self.restarts}
        typed = [word for option, value in options.items() if value is not None for word in (option, str(value))]
        return (*typed, *(word for device in self.devices for word in ("--device", device)))


def make(name: str, site: Site, wanted: Wanted, kind: str | None, further: Further) -> str:
    """The manifest.

    Args:
        name: the site's, or its profile's file.
        site: its profile.
        wanted: the job.
        kind: of the manifest; None takes `DEFAULT_KIND`.
        further: what only a manifest can be asked for.

    Raises:
        MusterError: there is no such kind, or Kubernetes would not take it.
    """
    kinds: dict[str, Kind] = {each: each for each in KINDS}
    known = kinds.get(kind or DEFAULT_KIND)
    if known is None:
        raise MusterError(
            "there is no such manifest", seen=f"--kind={kind}", fix=" or ".join(f"--kind {each}" for each in KINDS)
        )
    if wanted.account is not None:
        raise MusterError("Kubernetes knows no accounts", seen=f"--account={wanted.account}", fix="leave it out")
    return kubernetes.render(known, pods(name, site, wanted, known, further))


def pods(name: str, site: Site, wanted: Wanted, kind: Kind, further: Further) -> Pods:
    """What the manifest asks for."""
    here = Context(wanted.nodes, gpu=site.nodes.gpu.value if site.nodes.gpu else None)
    gpus, queue = site.nodes.gpus, site.launch.partition
    usual_gpus = gpus.value if gpus and holds(gpus.when, here) else _NO_PODS.gpus

    return Pods(
        image=kubernetes.NO_IMAGE if wanted.image == IMAGE else wanted.image,
        arguments=resuming(wanted),
        nodes=wanted.nodes,
        seconds=wanted.time_s,
        name=wanted.name,
        gpus=usual_gpus if wanted.gpus is None else wanted.gpus,
        queue=wanted.partition or (queue.value if queue and holds(queue.when, here) else None),
        variables={**_NO_PODS.variables, **_caches(site, here), **resolve(site.variables, here)},
        devices=dict(kubernetes.device(text) for text in further.devices),
        claim=_NO_PODS.claim if further.claim is None else further.claim,
        shared_memory=_NO_PODS.shared_memory if further.shm is None else further.shm,
        uid=_NO_PODS.uid if further.uid is None else further.uid,
        restarts=_NO_PODS.restarts if further.restarts is None else further.restarts,
        made_by=_made_by(name, wanted, kind, further),
    )


def _caches(site: Site, here: Context) -> dict[str, str]:
    """Where the profile keeps downloads, without what a shell would have to expand: pods have none."""
    return {name: value for name, value in resolve(site.caches, here).items() if not quoting.needs(value)}


def resuming(wanted: Wanted) -> tuple[str, ...]:
    """The command, such that a pod that is started again goes on where the one before it was stopped."""
    options = {word.partition("=")[0] for word in wanted.command}
    if not wanted.is_training or "--resume" in options:
        return wanted.command
    name = () if "--name" in options else (f"--name={wanted.name}",)
    return (*wanted.command, *name, "--resume=auto")


def _made_by(name: str, wanted: Wanted, kind: Kind, further: Further) -> str:
    start = quoting.words(["muster", "job", name])
    options = quoting.words(["--kind", kind, *further.words])
    return f"{start} {options}{made_by(name, wanted).removeprefix(start)}"
