"""Kubernetes' manifests: users' arguments reach the pods unchanged; values that Kubernetes would refuse are refused."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from muster.entrypoint.jobs import kubernetes, making
from muster.entrypoint.jobs.kubernetes import KINDS
from muster.entrypoint.jobs.script import Wanted
from muster.errors import MusterError
from muster.paths import JOBS
from tests.jobs import pods
from tests.jobs.kept import kept
from tests.jobs.pods import manifest

HOSTILE = (
    *('"', "'", "\\", "a\nb", "a\r\nb", "\ttab", "# no comment", ": no key", "- no item", "---", "...", "*pod", "&pod"),
    *("!!python/object/apply:os.system [id]", "{{ 7 * 7 }}", "{% raw %}", "${HOME}", "`id`", "; rm -rf /", "", " "),
    *("$(HOME)", "$(PET_NNODES)", "$$(PET_NNODES)", "$(TORCH_HOME)$(TORCH_HOME)", "$", "$$", "$$$", "a$", "$(", "$)"),
    *(
        "null",
        "~",
        "yes",
        "1e3",
        "0x10",
        "2026-11-22",
        "=",
        "<<",
        "\x85",
        "\u2028",
        "\u2029",
        "\ufeff",
        "\x7f",
        "\x1b[0m",
    ),
    *("é", "日本", "\U0001f600", "\U000e0001", "\xa0", "\ufffe", "%TAG", "@at", "|", ">"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_reaches_the_program_as_it_was_typed(kind: str) -> None:
    words = ("sh", "-c", *HOSTILE)
    text = manifest(kind, command=words)
    for pod in pods.of(text):
        assert tuple(pod.command[-len(words) :]) == words
    # Nothing but the command has changed.
    plain = pods.documents(manifest(kind))
    for document, other in zip(pods.documents(text), plain, strict=True):
        if document["kind"] != "Service":
            args = pods.template(other)["spec"]["containers"][0]["args"]
            pods.template(document)["spec"]["containers"][0]["args"] = args
        assert document == other


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_is_an_argument(words: list[str]) -> None:
    (pod,) = pods.of(manifest("job", nodes=1, command=("sh", *words)))
    assert pod.command == ["tini", "--", "sh", *words]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "asked",
    [
        *(
            {"name": name}
            for name in ("", "A", "my_job", "1st", "-a", "a-", "a.b", "a b", 'a"', "a\nb", "$(id)", 60 * "a")
        ),
        {"partition": "A b"},
        *({"image": image} for image in ("", "other.sif", "docker://a", "a b", "/images/a", "Muster", "a:b:c")),
        *({"claim": claim} for claim in ("", "my runs", "Runs", "-a")),
    ],
    ids=str,
)
def test_what_kubernetes_would_refuse_is_refused_with_a_line_to_type(kind: str, asked: dict[str, Any]) -> None:
    with pytest.raises(MusterError) as refusal:
        manifest(kind, **asked)
    assert refusal.value.code == 2
    assert refusal.value.fix


@pytest.mark.parametrize(
    "text", ["", "rdma", "rdma/", "/hca", "rdma/hca=0", "rdma/hca=x", "rdma/hca = 1", "rdma/a b", "a/b/c"]
)
def test_a_device_is_a_resource_of_a_node(text: str) -> None:
    with pytest.raises(MusterError, match="resource"):
        kubernetes.device(text)


@pytest.mark.parametrize(("kind", "most"), [("job", 54), ("jobset", 47), ("pytorchjob", 53)])
def test_a_name_leaves_room_for_those_of_its_pods(kind: str, most: int) -> None:
    made = pods.of(manifest(kind, nodes=12, name=most * "a"))
    assert max(len(pod.host) for pod in made) <= 63
    with pytest.raises(MusterError, match=f"at most {most} characters"):
        manifest(kind, nodes=12, name=(most + 1) * "a")


def test_our_trainers_go_on_where_they_were_stopped() -> None:
    command = ("train", "fsdp", "--epochs", "3")
    assert kubernetes.resuming(Wanted(command=command, name="a")) == (*command, "--name=a", "--resume=auto")
    named = ("train", "ddp", "--name=b")
    assert kubernetes.resuming(Wanted(command=named)) == (*named, "--resume=auto")
    for theirs in (("train", "ddp", "--resume", "x"), ("train", "plan"), ("muster", "run", "a.py")):
        assert kubernetes.resuming(Wanted(command=theirs)) == theirs


def test_what_the_user_asks_for_is_in_the_manifest() -> None:
    size = {"nodes": 3, "time": "1m", "gpus": 2, "claim": "runs", "device": ["rdma/hca=2"]}
    text = manifest("job", image="ghcr.io/a/b:1", partition="gpu-queue", name="a", **size)
    document = pods.job(text)
    spec = pods.template(document)["spec"]
    assert document["metadata"]["name"] == "a"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert (document["spec"]["activeDeadlineSeconds"], document["spec"]["backoffLimit"]) == (60, 9)
    assert spec["containers"][0]["image"] == "ghcr.io/a/b:1"
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2", "rdma/hca": "2"}
    assert [volume.get("persistentVolumeClaim") for volume in spec["volumes"]] == [{"claimName": "runs"}, None, None]
    (made_by,) = [line for line in text.splitlines() if line.startswith("# Made by:")]
    for words in ("--kind job", "--claim runs", "--device rdma/hca=2", "--nodes 3", "--image ghcr.io/a/b:1"):
        assert words in made_by
    # That command makes the same manifest again.
    typed = shlex.split(made_by.removeprefix("# Made by:"))
    code = f"import sys; from muster.entrypoint.cli import muster; sys.argv = {typed!r}; muster()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert (answer.returncode, answer.stdout) == (0, text), answer.stderr


def test_a_profile_of_a_cluster_gives_gpus_queue_and_variables(tmp_path: Path) -> None:
    """A profile whose values are hostile to YAML and to Kubernetes."""
    file = tmp_path / "our cluster.toml"
    value = 'a"b: # $(HOME) $$ {{ 1 }}'
    file.write_text(
        'title = "Ours"\nscheduler = "kubernetes"\nstatus = "unverified"\n'
        '[sources.us]\nurl = "https://example.org"\nread = 2026-11-22\n'
        '[nodes]\ngpus = {value = 8, source = "us"}\n[launch]\npartition = {value = "all", source = "us"}\n'
        f'[variables]\nNCCL_DEBUG = {{value = {json.dumps(value)}, source = "us"}}\n'
        '[caches]\nTORCH_HOME = {value = "/cache", source = "us"}\n'
    )
    for kind in KINDS:
        text = making.make(str(file), Wanted(kind=kind))
        document = pods.job(text)
        assert pods.template(document)["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "all"
        for pod in pods.of(text):
            assert (pod.env["NCCL_DEBUG"], pod.env["TORCH_HOME"]) == (value, "/cache")


CLUSTER = """title = "Ours"
scheduler = "kubernetes"
status = "unverified"
sources = {us = {url = "https://example.org", read = 2026-11-22}}
"""


def test_a_folder_that_a_shell_would_have_to_expand_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(f'{CLUSTER}caches.HF_HOME = {{value = "$SCRATCH/hf", source = "us"}}\n')
    (pod, *_) = pods.of(making.make(str(file), Wanted()))
    assert pod.env["HF_HOME"] == kubernetes.CACHES["HF_HOME"]


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_cluster_that_runs_no_such_image_says_why(tmp_path: Path, kind: str | None) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(f'{CLUSTER}refused = {{value = "no CUDA", source = "us"}}\n')
    with pytest.raises(MusterError, match="this image does not run on Ours: no CUDA"):
        making.make(str(file), Wanted(kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_words_stay_in_their_comment(kind: str) -> None:
    text = manifest(kind, command=("train", "ddp", *HOSTILE))
    assert [document["kind"] for document in pods.documents(text)] == [
        document["kind"] for document in pods.documents(manifest(kind))
    ]
    for line in text[: text.index("apiVersion")].splitlines():
        assert line.startswith("#")


@pytest.mark.parametrize(
    ("site", "asked", "words"),
    [
        ("kubernetes", {"kind": "cronjob"}, "no such kind of manifest"),
        ("kubernetes", {"account": "a"}, "no accounts"),
        ("kubernetes", {"device": ["rdma"]}, "no name of a resource"),
        ("slurm", {"kind": "job"}, "takes a script"),
        ("slurm", {"claim": "a"}, "takes a script"),
        ("slurm", {"device": ["rdma/hca"]}, "takes a script"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(site: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(MusterError, match=words):
        making.make(site, Wanted(**asked))


def test_no_image_is_made_up() -> None:
    assert pods.template(pods.job(making.make("kubernetes", Wanted())))["spec"]["containers"][0]["image"] == (
        kubernetes.NO_IMAGE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifests_that_are_kept_are_those_that_are_made(kind: str) -> None:
    path = JOBS / f"kubernetes-{kind}.yaml"
    assert path.read_text(encoding="utf-8") == making.make("kubernetes", Wanted(kind=kind))
    assert path in kept()
