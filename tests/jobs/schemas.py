"""Checks manifests against their published schemas, strictly: a field that no schema knows is an error.

The core kinds have JSON schemas. JobSet and PyTorchJob are extensions, of which package registries have only classes
generated from the schemas: these have the names and types of fields, not the values that an enumeration or a rule
allows. The child Job and the pods in them are checked against the core schemas too.
"""

from typing import Any

import kubernetes_validate
from kubeflow.training import models as kubeflow
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

# The oldest version with all of a Job's podFailurePolicy, and the newest known one.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def check(document: dict[str, Any]) -> None:
    """Checks a document of a manifest against its schemas.

    Raises:
        Exception: it does not match; the message names the field.
    """
    if document["kind"] == "JobSet":
        assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        _same(document, JobsetV1alpha2JobSet.from_dict(document).to_dict(), "JobSet")
        for group in document["spec"]["replicatedJobs"]:
            _core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **group["template"]})
    elif document["kind"] == "PyTorchJob":
        assert document["apiVersion"] == "kubeflow.org/v1"
        _generated(document, "KubeflowOrgV1PyTorchJob", "PyTorchJob")
    else:
        _core(document)


def _core(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def _same(given: Any, read: Any, where: str) -> None:
    """Raises unless all of `given` is in `read`: the classes silently drop fields that they don't know."""
    if isinstance(given, dict):
        if given.keys() != read.keys():
            raise ValueError(f"{where}: {sorted(given.keys() ^ read.keys())}")
        for key, value in given.items():
            _same(value, read[key], f"{where}.{key}")
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            _same(one, other, f"{where}[{number}]")
    elif given != read:
        raise ValueError(f"{where}: {given!r} was read as {read!r}")


def _generated(value: Any, kind: str, where: str) -> None:
    """Raises unless `value` is of the type that the classes of the training operator call `kind`."""
    if kind.startswith("dict(str, "):
        for key, item in value.items():
            _generated(item, kind.removeprefix("dict(str, ")[:-1], f"{where}.{key}")
    elif kind == "V1PodTemplateSpec":
        _core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": value})
    elif kind == "V1ObjectMeta":
        _core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": value, "template": {}})
    elif kind in ("str", "int", "bool"):
        if type(value) is not {"str": str, "int": int, "bool": bool}[kind]:
            raise TypeError(f"{where}: {value!r} is no {kind}")
    else:
        of_class = getattr(kubeflow, kind)
        kinds = {name: of_class.openapi_types[own] for own, name in of_class.attribute_map.items()}
        for key, item in value.items():
            if key not in kinds:
                raise ValueError(f"{where}: {key} is unknown")
            _generated(item, kinds[key], f"{where}.{key}")
