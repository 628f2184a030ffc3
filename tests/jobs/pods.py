"""The pods that Kubernetes' controllers would make of a manifest: their names, variables and commands.

It stands for a cluster, as none runs here. The sources have the rules.

Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
Source: https://jobset.sigs.k8s.io/docs/concepts/
Source: https://github.com/kubeflow/training-operator/blob/master/pkg/controller.v1/pytorch/envvar.go
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted

# The kubelet sets them in every pod.
KUBELET = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
PORT = "23456"
IMAGE = "registry.example/team/muster:1.0@sha256:" + 64 * "0"


@dataclass(frozen=True)
class Pod:
    """A pod.

    Attributes:
        host: its host name.
        address: the name by which other pods reach it.
        env: the variables of its main container.
        command: the command of its main container.
        before: the command of its init container, which has to end first; empty without one.
    """

    host: str
    address: str
    env: dict[str, str]
    command: list[str]
    before: list[str]

    def record(self, path: Path) -> Path:
        """Writes its environment as a recording."""
        lines = [f"# host: {self.host}", *(f"{name}={value}" for name, value in self.env.items())]
        path.write_text("\n".join(lines) + "\n")
        return path


def manifest(kind: str = "job", **asked: Any) -> str:
    """A manifest of that kind; `asked` are fields of `Wanted`."""
    return making.make("kubernetes", Wanted(**{"image": IMAGE, "gpus": 1, **asked, "kind": kind}))


def documents(text: str) -> list[dict[str, Any]]:
    """The manifest's documents."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def job(text: str) -> dict[str, Any]:
    """The document that is the job."""
    return documents(text)[-1]


def template(document: dict[str, Any]) -> dict[str, Any]:
    """The pod template of a job; of a PyTorchJob, that of the master."""
    spec = document["spec"]
    if document["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Master"]["template"]
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]


def of(text: str, old_operator: bool = False) -> list[Pod]:
    """The pods of a manifest, in the order of their ranks.

    Args:
        text: the manifest.
        old_operator: whether the training operator that runs a PyTorchJob is older than 1.7.
    """
    document = job(text)
    name, spec = document["metadata"]["name"], document["spec"]
    if document["kind"] == "PyTorchJob":
        return _of_pytorchjob(name, spec, old_operator)
    service = documents(text)[0]
    if document["kind"] == "JobSet":
        group = spec["replicatedJobs"][0]
        base, spec, domain = f"{name}-{group['name']}-0", group["template"]["spec"], spec["network"]["subdomain"]
    else:
        base, domain = name, spec["template"]["spec"]["subdomain"]
        # A Service without an address gives the pods their names; it selects them by a label that the Job sets.
        assert service["kind"] == "Service"
        assert service["metadata"]["name"] == domain
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    return [
        _pod(f"{base}-{index}", f"{base}-{index}.{domain}", spec["template"], {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]


def _of_pytorchjob(name: str, spec: dict[str, Any], old_operator: bool) -> list[Pod]:
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(group["replicas"] for group in replicas.values())
    per_node = spec.get("nprocPerNode", "auto")
    world_size = total if old_operator or not per_node.isdigit() else total * int(per_node)
    pods: list[Pod] = []
    for group in ("Master", "Worker"):
        for index in range(replicas[group]["replicas"] if group in replicas else 0):
            rank = len(pods)
            added = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": PORT}
            added |= {"PYTHONUNBUFFERED": "0", "WORLD_SIZE": str(world_size), "RANK": str(rank)}
            if not old_operator:
                added |= {"PET_NPROC_PER_NODE": per_node, "PET_NODE_RANK": str(rank), "PET_NNODES": str(total)}
            host = f"{name}-{group.lower()}-{index}"
            pods.append(_pod(host, host, replicas[group]["template"], added))
    return pods


def _pod(host: str, address: str, of_template: dict[str, Any], added: dict[str, str]) -> Pod:
    container = of_template["spec"]["containers"][0]
    env = dict(KUBELET)
    for entry in container.get("env", []):
        env[entry["name"]] = expand(entry["value"], env)
    env |= added
    # Without a command of its own the container has the image's entrypoint.
    words = [*container.get("command", ["tini", "--"]), *container.get("args", [])]
    before = [word for each in of_template["spec"].get("initContainers", []) for word in each["command"]]
    return Pod(host, address, env, [expand(word, env) for word in words], [expand(word, {}) for word in before])


def expand(text: str, env: dict[str, str]) -> str:
    """`text` with $(NAME) replaced where NAME is set, and $$ as $."""

    def replaced(match: "re.Match[str]") -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)
