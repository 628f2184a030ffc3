"""Manifests for Kubernetes: one pod a node, as a PyTorchJob, a JobSet or an indexed Job.

Every value is checked, or quoted, or both: a template's `{{ value }}` is a quoted YAML string unless it is a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from entrypoint import ROOT
from entrypoint.jobs import quoting
from train.errors import MusterError

Kind = Literal["pytorchjob", "jobset", "job"]
KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "job")

TEMPLATES = ROOT / "jobs" / "templates"
NO_IMAGE = "registry.example/muster:latest"
"""What stands for the image until the user names one: a name that no registry will ever have (RFC 2606)."""
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
_MAX_NUMBER = 2**31 - 1
"""Kubernetes counts in 32 bits."""


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
        grace_seconds: from SIGTERM to SIGKILL.
        wait_seconds: for the pods to have names.
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
    grace_seconds: int = 300
    wait_seconds: int = 1800
    queue: str | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: dict(CACHES))
    made_by: str = "muster job kubernetes"


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
        {name: getattr(pods, name) for name in Pods.__dataclass_fields__},
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
    if not _SUBDOMAIN.fullmatch(pods.claim) or len(pods.claim) > _MAX_SUBDOMAIN:
        raise MusterError("this can't be the name of a claim", seen=f"--claim {pods.claim}", fix="--claim muster-runs")
    if pods.queue is not None and (not _SUBDOMAIN.fullmatch(pods.queue) or len(pods.queue) > _MAX_LABEL):
        raise MusterError(
            "this can't be the name of a queue", seen=f"--partition {pods.queue}", fix="--partition training"
        )
    if not _SIZE.fullmatch(pods.shared_memory):
        raise MusterError("this is no size of memory", seen=f"--shm {pods.shared_memory}", fix="--shm 16Gi")
    least = {"nodes": 1, "seconds": 1, "gpus": 0, "restarts": 0, "uid": 0, "grace_seconds": 0, "wait_seconds": 1}
    for name, bound in least.items():
        if getattr(pods, name) < bound:
            raise MusterError(f"{name} is at least {bound}", seen=f"{name}={getattr(pods, name)}", fix=f"{bound}")
    # An indexed Job counts the restarts of all its pods.
    most = {"restarts": _MAX_NUMBER // pods.nodes, "uid": _MAX_NUMBER - 1}
    for name, bound in most.items():
        if getattr(pods, name) > bound:
            raise MusterError(
                f"{name} is at most {bound}", seen=f"--{name} {getattr(pods, name)}", fix=f"--{name} {bound}"
            )
    if not pods.arguments:
        raise MusterError("there is nothing to run", seen="nothing after --", fix="-- train ddp")
    for word in pods.arguments:
        if re.search("[\0\ud800-\udfff]", word):
            raise MusterError("this argument is no text", seen=ascii(word), fix="an argument in UTF-8")


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
