"""A profile and a wanted job -> a manifest for Kubernetes: one pod a node, as a PyTorchJob, a JobSet or an indexed Job.

Every value is checked, or quoted, or both: a template's `{{ value }}` is a quoted YAML string unless it is a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from muster import JOBS
from muster.entrypoint.jobs import quoting
from muster.entrypoint.jobs.script import IMAGE, Wanted, made_by
from muster.entrypoint.sites.schema import Context, Site, resolve, value_of
from muster.errors import MusterError

Kind = Literal["pytorchjob", "jobset", "job"]
KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "job")

TEMPLATES = JOBS / "templates"
NO_IMAGE = "registry.example/muster:latest"
"""What stands for the image until the user names one: a name that no registry will ever have (RFC 2606)."""
DEFAULT_KIND: Kind = "job"
"""What a cluster needs nothing installed for."""
GROUP = "node"
"""The name of a JobSet's only group of pods."""
CACHES = {"TORCH_HOME": "/workspace/.cache/torch", "HF_HOME": "/workspace/.cache/huggingface"}
"""Where downloads are kept: on the volume with the runs, as the image's own folders can't be written to."""
# RFC 1035, as Services need it: stricter than RFC 1123 in that no digit comes first.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RESOURCE = re.compile(r"([-a-z0-9.]+/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)(=([1-9][0-9]{0,5}))?")
_IMAGE = re.compile(
    r"[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)*(:[a-zA-Z0-9_][a-zA-Z0-9_.-]*)?(@sha256:[0-9a-f]{64})?"
)
_SIZE = re.compile(r"[1-9][0-9]{0,6}(Mi|Gi|Ti)")
_MAX_LABEL, _MAX_SUBDOMAIN = 63, 253
GRACE_S = 300
"""From SIGTERM to SIGKILL."""
WAIT_S = 1800
"""For the pods to have names."""
# The options that only a manifest has, by the field of Pods.
_FIELDS = {"--claim": "claim", "--shm": "shared_memory", "--uid": "uid", "--restarts": "restarts"}


@dataclass(frozen=True)
class Pods:
    """What a manifest asks for.

    Attributes:
        image: as a registry knows it.
        arguments: the command in each pod: train, ddp, --epochs, 3.
        nodes: how many pods.
        seconds: how long they may run.
        name: the job's.
        claim: the PersistentVolumeClaim with the runs.
        gpus: of each pod.
        shared_memory: the size of /dev/shm: "16Gi".
        devices: further resources of each pod, for RDMA: rdma/hca_shared_devices_a=1.
        restarts: attempts after the first.
        uid: whom the pods run as.
        queue: Kueue's, if any.
        variables: further ones of each pod.
        made_by: the command that made the manifest, for its first lines.
    """

    image: str
    arguments: tuple[str, ...]
    nodes: int = 2
    seconds: int = 3600
    name: str = "muster"
    claim: str = "muster"
    gpus: int = 1
    shared_memory: str = "16Gi"
    devices: Mapping[str, int] = field(default_factory=dict[str, int])
    restarts: int = 3
    uid: int = 1000
    queue: str | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: dict(CACHES))
    made_by: str = "muster job kubernetes"


def make(name: str, site: Site, wanted: Wanted, kind: str | None, further: Mapping[str, Any]) -> str:
    """The manifest.

    Args:
        name: the site's, or its profile's file.
        site: its profile.
        wanted: the job.
        kind: of the manifest; None takes `DEFAULT_KIND`.
        further: the options that only a manifest has, as far as they were given; --device is a tuple.

    Raises:
        MusterError: there is no such kind, or Kubernetes would not take it.
    """
    kinds: dict[str, Kind] = {each: each for each in KINDS}
    known = kinds.get(kind or DEFAULT_KIND)
    if known is None:
        fix = " or ".join(f"--kind {each}" for each in KINDS)
        raise MusterError("there is no such manifest", seen=f"--kind={kind}", fix=fix)
    if wanted.account is not None:
        raise MusterError("Kubernetes knows no accounts", seen=f"--account={wanted.account}", fix="leave it out")
    here = Context(wanted.nodes, gpu=site.nodes.gpu.value if site.nodes.gpu else None)
    gpus = wanted.gpus if wanted.gpus is not None else value_of(site.nodes.gpus, here)
    # Pods have no shell that would expand variables in a folder.
    caches = {name: value for name, value in resolve(site.caches, here).items() if not quoting.needs(value)}
    start = quoting.words(["muster", "job", name])
    options = quoting.words(["--kind", known, *typed(further)])
    pods = Pods(
        image=NO_IMAGE if wanted.image == IMAGE else wanted.image,
        arguments=resuming(wanted),
        nodes=wanted.nodes,
        seconds=wanted.time_s,
        name=wanted.name,
        gpus=1 if gpus is None else gpus,
        queue=wanted.partition or value_of(site.launch.partition, here),
        variables={**CACHES, **caches, **resolve(site.variables, here)},
        devices=dict(device(text) for text in further.get("--device", ())),
        made_by=f"{start} {options}{made_by(name, wanted).removeprefix(start)}",
        **{field: further[option] for option, field in _FIELDS.items() if option in further},
    )
    return render(known, pods)


def typed(further: Mapping[str, Any]) -> list[str]:
    """The options of a manifest as words of a command line."""
    words = [word for option in _FIELDS if option in further for word in (option, str(further[option]))]
    return [*words, *(word for device in further.get("--device", ()) for word in ("--device", device))]


def resuming(wanted: Wanted) -> tuple[str, ...]:
    """The command, such that a pod that is started again goes on where the one before it was stopped."""
    options = {word.partition("=")[0] for word in wanted.command}
    if not wanted.is_training or "--resume" in options:
        return wanted.command
    name = () if "--name" in options else (f"--name={wanted.name}",)
    return (*wanted.command, *name, "--resume=auto")


def render(kind: Kind, pods: Pods) -> str:
    """The manifest, as YAML.

    Raises:
        MusterError: a name or a number is none that Kubernetes takes.
    """
    # Here and not above: no command but this one needs it.
    import jinja2

    check(kind, pods)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_yaml,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(  # pyright: ignore[reportUnknownMemberType]
        bare=_Bare, literal=literal, comment=quoting.comment
    )
    return templates.get_template(f"kubernetes-{kind}.j2").render(
        vars(pods),
        grace_seconds=GRACE_S,
        wait_seconds=WAIT_S,
        kind=kind,
        group=GROUP,
        pod_name=_pod_name(kind, pods.name),
        limits={**({"nvidia.com/gpu": pods.gpus} if pods.gpus else {}), **pods.devices},
    )


def check(kind: Kind, pods: Pods) -> None:
    """Returns if Kubernetes takes all that `pods` says.

    Raises:
        MusterError: it does not.
    """
    if pods.image.endswith(".sif") or not _IMAGE.fullmatch(pods.image):
        raise MusterError(
            "Kubernetes takes images from a registry only",
            seen=f"--image {pods.image}",
            fix="--image REGISTRY/NAME:TAG, without a scheme",
        )
    _check_name(kind, pods)
    for option, value, pattern, most, fix in (
        ("--claim", pods.claim, _SUBDOMAIN, _MAX_SUBDOMAIN, "muster-runs"),
        ("--partition", pods.queue, _SUBDOMAIN, _MAX_LABEL, "training"),
        ("--shm", pods.shared_memory, _SIZE, _MAX_LABEL, "16Gi"),
    ):
        if value is not None and (not pattern.fullmatch(value) or len(value) > most):
            raise MusterError(f"Kubernetes takes no such {option}", seen=f"{option} {value}", fix=f"{option} {fix}")


def _check_name(kind: Kind, pods: Pods) -> None:
    # JobSet's own rule, which suits an indexed Job too: a pod's name gets five random letters at its end.
    longest = f"{_pod_name(kind, '')}{pods.nodes - 1}" + ("" if kind == "pytorchjob" else "-abcde")
    most = _MAX_LABEL - len(longest)
    if not _LABEL.fullmatch(pods.name) or len(pods.name) > most:
        raise MusterError(
            f"a job's name is small letters, digits and hyphens, a letter first, {most} at the most",
            seen=f"--name {pods.name}",
            fix="--name my-training",
        )


def _pod_name(kind: Kind, name: str) -> str:
    """What the names of the pods begin with: their number follows."""
    return name + {"job": "-", "jobset": f"-{GROUP}-0-", "pytorchjob": "-worker-"}[kind]


def device(text: str) -> tuple[str, int]:
    """The resource and how many of it that `text` asks for: rdma/hca_shared_devices_a, or with =2.

    Raises:
        MusterError: it is no name of such a resource.
    """
    match = _RESOURCE.fullmatch(text)
    if match is None:
        raise MusterError(
            "this is no resource of a node", seen=f"--device {text}", fix="--device rdma/hca_shared_devices_a=1"
        )
    return match[1], int(match[4] or 1)


def literal(text: str) -> str:
    """`text` such that Kubernetes gives it to the container as it is: it takes $(NAME) for a variable, $$ for $.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return text.replace("$", "$$")


class _Bare(str):
    """Text that is YAML already, or stands in a comment or a script: of checked names only."""


def _yaml(value: Any) -> Any:
    """`value` as YAML on one line: strings quoted, whatever is in them."""
    if isinstance(value, _Bare | int):
        return value
    if isinstance(value, tuple | list):
        return "[" + ", ".join(str(_yaml(item)) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType]
    return '"' + "".join(_escaped(character) for character in str(value)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
