"""Kubernetes' manifests match their published schemas, checked so strictly that a misspelt field is found."""

import copy
from typing import Any

import pytest

from muster.entrypoint.jobs.kubernetes import KINDS
from tests.jobs import pods


@pytest.fixture(scope="module")
def schemas() -> Any:
    return pytest.importorskip("tests.jobs.schemas", reason="the dev extra is not installed")


SHAPES: list[dict[str, Any]] = [
    {},
    {"nodes": 1},
    {"gpus": 0},
    {"nodes": 64, "gpus": 8, "device": ["rdma/hca=8"], "partition": "gpus", "command": ("train", '$(HOME)\n"')},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_as_their_published_schemas_say(kind: str, shape: dict[str, Any], schemas: Any) -> None:
    for document in pods.documents(pods.manifest(kind, **shape)):
        schemas.check(document)


# Mistakes in each kind of manifest: the path, and a field that does not exist there.
MISTAKES = {
    "job": [
        ("spec", "podFailurePolicies"),
        ("spec.template.spec", "subDomain"),
        ("spec.template.spec.containers.0", "arg"),
        ("spec.template.spec.volumes.1.emptyDir", "size"),
        ("spec.podFailurePolicy.rules.1.onExitCodes", "codes"),
    ],
    "jobset": [
        ("spec", "failurePolicies"),
        ("spec.network", "publishNotReady"),
        ("spec.failurePolicy.rules.0", "onJobFailureReason"),
        ("spec.replicatedJobs.0", "count"),
        ("spec.replicatedJobs.0.template.spec", "backOffLimit"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers.0.securityContext", "readOnly"),
    ],
    "pytorchjob": [
        ("", "specs"),
        ("spec", "nProcPerNode"),
        ("spec.runPolicy", "activeDeadline"),
        ("spec.pytorchReplicaSpecs.Worker", "replica"),
        ("spec.pytorchReplicaSpecs.Master.template.spec.containers.0.resources", "limit"),
    ],
}


@pytest.mark.parametrize(("kind", "path", "key"), [(kind, *mistake) for kind in KINDS for mistake in MISTAKES[kind]])
def test_a_misspelt_field_is_caught(kind: str, path: str, key: str, schemas: Any) -> None:
    document = copy.deepcopy(pods.job(pods.manifest(kind)))
    place: Any = document
    for step in path.split(".") if path else ():
        place = place[int(step) if step.isdigit() else step]
    place[key] = 1
    with pytest.raises(Exception, match=key):
        schemas.check(document)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_in_place_of_a_text_is_caught(kind: str, schemas: Any) -> None:
    document = copy.deepcopy(pods.job(pods.manifest(kind)))
    pods.template(document)["spec"]["containers"][0]["args"] = [31415]
    with pytest.raises(Exception, match="31415"):
        schemas.check(document)
