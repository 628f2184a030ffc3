"""Manifests for Kubernetes from a profile and a wanted job: one pod a node, as a PyTorchJob, JobSet or indexed Job.

Every value is checked, or quoted, or both: a template's `{{ value }}` is a quoted YAML string unless it is a number.
"""

import json
import re
from dataclasses import replace
from typing import Any

from muster.entrypoint.jobs import quoting
from muster.entrypoint.jobs.script import Wanted, made_by, new_templates, of_registry
from muster.entrypoint.sites.schema import Context, Site, resolve, value_of
from muster.errors import MusterError

KINDS = ("pytorchjob", "jobset", "job")
CLAIM = "muster"
"""The PersistentVolumeClaim with the runs."""
NO_IMAGE = "registry.example/muster:latest"
"""A placeholder for the image until the user names one: no registry will ever have this name (RFC 2606)."""
CACHES = {"TORCH_HOME": "/workspace/.cache/torch", "HF_HOME": "/workspace/.cache/huggingface"}
"""Where downloads are kept: on the volume with the runs, as the image's own folders can't be written to."""
# RFC 1035, as Services need it: stricter than RFC 1123 in that no digit comes first.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCE = re.compile(r"([-a-z0-9.]+/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)(=([1-9][0-9]{0,5}))?")
_MAX_LABEL = 63
# The part of a pod's name between the job's name and the pod's number.
_NUMBERED = {"job": "-", "jobset": "-node-0-", "pytorchjob": "-worker-"}


def make(name: str, site: Site, wanted: Wanted) -> str:
    """The manifest, as YAML.

    Args:
        name: the site's, or its profile's file.
        site: its profile.
        wanted: the job.

    Raises:
        MusterError: there is no such kind, or Kubernetes would refuse the manifest.
    """
    kind = wanted.kind or "job"  # it needs nothing installed in the cluster
    image = NO_IMAGE if wanted.image == Wanted.image else wanted.image
    claim = CLAIM if wanted.claim is None else wanted.claim
    here = Context(wanted.nodes, gpu=site.nodes.gpu.value if site.nodes.gpu else None)
    queue = wanted.partition if wanted.partition is not None else value_of(site.launch.partition, here)
    _check(kind, wanted, image, claim)
    gpus = wanted.gpus if wanted.gpus is not None else value_of(site.nodes.gpus, here)
    gpus = 1 if gpus is None else gpus
    devices = dict(device(text) for text in wanted.device or ())
    # Pods have no shell that would expand variables in a folder.
    caches = {name: value for name, value in resolve(site.caches, here).items() if not quoting.variables_in(value)}
    templates = new_templates(finalize=_yaml, bare=_Bare, literal=literal, comment=quoting.comment)
    return templates.get_template(f"kubernetes-{kind}.j2").render(
        kind=kind,
        name=wanted.name,
        image=image,
        arguments=resuming(wanted),
        nodes=wanted.nodes,
        seconds=wanted.time_s,
        claim=claim,
        queue=queue,
        gpus=gpus,
        devices=devices,
        limits={**({"nvidia.com/gpu": gpus} if gpus else {}), **devices},
        variables={**CACHES, **caches, **resolve(site.variables, here)},
        pod_name=wanted.name + _NUMBERED[kind],
        made_by=made_by(name, replace(wanted, kind=kind)),
    )


def resuming(wanted: Wanted) -> tuple[str, ...]:
    """The command; if it is a training, with the options by which a restarted pod resumes it."""
    options = {word.partition("=")[0] for word in wanted.command}
    if not wanted.is_training or "--resume" in options:
        return wanted.command
    name = () if "--name" in options else (f"--name={wanted.name}",)
    return (*wanted.command, *name, "--resume=auto")


def _check(kind: str, wanted: Wanted, image: str, claim: str) -> None:
    """Checks the kind, account, image, claim and the job's name; Kubernetes itself refuses other wrong names.

    Raises:
        MusterError: one of them is not valid for Kubernetes.
    """
    if kind not in KINDS:
        fix = " or ".join(f"--kind {each}" for each in KINDS)
        raise MusterError("there is no such kind of manifest", seen=f"--kind={kind}", fix=fix)
    if wanted.account is not None:
        raise MusterError("Kubernetes has no accounts", seen=f"--account={wanted.account}", fix="leave it out")
    of_registry(image, "Kubernetes")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
        wrong = "a claim's name has lower-case letters, digits, hyphens and dots"
        raise MusterError(wrong, seen=f"--claim={claim}", fix="--claim runs")
    # JobSet's own rule, which suits an indexed Job too: a pod's name gets five random letters at its end.
    added = f"{_NUMBERED[kind]}{wanted.nodes - 1}" + ("" if kind == "pytorchjob" else "-abcde")
    most = _MAX_LABEL - len(added)
    if not _LABEL.fullmatch(wanted.name) or len(wanted.name) > most:
        wrong = f"a job's name has lower-case letters, digits and hyphens, a letter first, at most {most} characters"
        raise MusterError(wrong, seen=f"--name {wanted.name}", fix="--name my-training")


def device(text: str) -> tuple[str, int]:
    """The resource that `text` names, and its number: 1 for rdma/hca_shared_devices_a, 2 with =2 after it.

    Raises:
        MusterError: it is no name of a resource.
    """
    if (match := _RESOURCE.fullmatch(text)) is None:
        fix = "--device rdma/hca_shared_devices_a=1"
        raise MusterError("this is no name of a resource", seen=f"--device {text}", fix=fix)
    return match[1], int(match[4] or 1)


def literal(text: str) -> str:
    """`text` escaped, so that Kubernetes passes it on as it is: it takes $(NAME) for a variable, $$ for $.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return text.replace("$", "$$")


class _Bare(str):
    """Text that `_yaml` does not quote, as it is YAML already, or part of a comment or a script: checked names only."""


def _yaml(value: Any) -> Any:
    """`value` as YAML on one line: strings quoted, whatever is in them."""
    if isinstance(value, _Bare):
        return value
    # JSON is YAML too, except that JSON may contain characters that are not printable.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
