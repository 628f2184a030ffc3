"""The conditions under which a profile's value holds."""

from pathlib import Path

import msgspec
import pytest

from muster.entrypoint.sites import schema
from muster.entrypoint.sites.schema import Context, Fact, When

TWO = Context(2, "NVIDIA GH200 120GB")


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (None, True),
        (When(nodes=">1"), True),
        (When(nodes="==1"), False),
        (When(nodes="==2"), True),
        (When(nodes=">=2,<64"), True),
        (When(nodes=">= 3"), False),
        (When(nodes="!=2"), False),
        (When(gpu="GH200"), True),
        (When(gpu="gh200"), True),
        (When(gpu="A100"), False),
        (When(nodes=">2", gpu="GH200"), False),
        (When(nodes=">1", gpu="GH200"), True),
    ],
)
def test_all_of_a_condition_has_to_hold(when: When | None, expected: bool) -> None:
    assert schema.holds(when, TWO) is expected


@pytest.mark.parametrize("when", [When(gpu="A"), When(nodes=">1", gpu="A")])
def test_a_condition_on_an_unknown_gpu_does_not_hold(when: When) -> None:
    assert not schema.holds(when, Context(2))


@pytest.mark.parametrize("nodes", ["many", "", "=>2", "1", "-1", ">1>2"])
def test_a_malformed_condition_is_refused(nodes: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"nodes": nodes}, When)


@pytest.mark.parametrize("nodes", [">=2,<64", ">= 2, < 64", "==1"])
def test_a_condition_that_can_be_read(nodes: str) -> None:
    assert not schema.holds(msgspec.convert({"nodes": nodes}, When), Context(64))


def test_the_values_that_hold() -> None:
    facts = {
        "ALWAYS": Fact(value="1", source="docs"),
        "SEVERAL": Fact(value="2", source="docs", when=When(nodes=">1")),
        "ELSEWHERE": Fact(value="3", source="docs", when=When(gpu="A100")),
    }
    assert schema.resolve(facts, TWO) == {"ALWAYS": "1", "SEVERAL": "2"}
    assert schema.resolve(facts, Context(1)) == {"ALWAYS": "1"}


def test_the_gpu_is_named_by_the_kernels_driver(tmp_path: Path) -> None:
    assert Context.here(3, gpus=tmp_path / "none").gpu is None
    folder = tmp_path / "0000:41:00.0"
    folder.mkdir()
    (folder / "information").write_text(
        "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 152\nGPU UUID: \t GPU-5f1a\nDevice Minor: \t 0\n"
    )
    assert Context.here(3, gpus=tmp_path).gpu == "NVIDIA A100-SXM4-40GB"
    assert Context.here(3, is_live=False, gpus=tmp_path).gpu is None
