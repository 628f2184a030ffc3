"""When a value holds."""

import sys
from pathlib import Path

import pytest

from muster.entrypoint.sites import schema
from muster.entrypoint.sites.schema import Context, Fact, When

TWO = Context(2, "NVIDIA GH200 120GB", "2.27.5")


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
        (When(nccl=">=2.27,<2.28"), True),
        (When(nccl="<2.27.5"), False),
        (When(nccl="<=2.27.5"), True),
        (When(nccl=">2.27"), True),
        (When(nccl="==2.27.5.0"), True),
        (When(nccl=">=2.3"), True),
        (When(nccl=">=2.100"), False),
        (When(nodes=">1", gpu="GH200", nccl="<2.27"), False),
        (When(nodes=">1", gpu="GH200", nccl=">=2.27"), True),
    ],
)
def test_all_of_a_condition_has_to_hold(when: When | None, expected: bool) -> None:
    assert schema.holds(when, TWO) is expected


@pytest.mark.parametrize("when", [When(gpu="A"), When(nccl="!=2.0"), When(nccl="<99"), When(nodes=">1", gpu="A")])
def test_what_is_not_known_holds_for_nothing(when: When) -> None:
    assert not schema.holds(when, Context(2))


def test_a_version_with_a_suffix_is_its_numbers() -> None:
    assert schema.holds(When(nccl=">=2.27.5,<2.27.6"), Context(1, nccl="2.27.5+cuda12.9"))


@pytest.mark.parametrize(
    "when",
    [
        When(nodes="many"), When(nodes=""), When(nodes="=>2"), When(nodes="1"), When(nodes="-1"),
        When(nccl="2.x"), When(nccl=">"), When(gpu=" "), When(),
    ],
)  # fmt: skip
def test_a_malformed_condition_is_not_readable(when: When) -> None:
    assert not schema.is_readable(when)


@pytest.mark.parametrize("when", [When(nodes=">=2,<64"), When(gpu="GH200"), When(nccl=">=2.27, <2.28", nodes="==1")])
def test_a_condition_that_can_be_read(when: When) -> None:
    assert schema.is_readable(when)


def test_the_values_that_hold() -> None:
    facts = {
        "ALWAYS": Fact(value="1", source="docs"),
        "SEVERAL": Fact(value="2", source="docs", when=When(nodes=">1")),
        "ELSEWHERE": Fact(value="3", source="docs", when=When(gpu="A100")),
    }
    assert schema.resolve(facts, TWO) == {"ALWAYS": "1", "SEVERAL": "2"}
    assert schema.resolve(facts, Context(1)) == {"ALWAYS": "1"}


def test_the_gpu_is_named_by_the_kernels_driver(tmp_path: Path) -> None:
    assert schema.gpu_name(tmp_path / "none") is None
    folder = tmp_path / "0000:41:00.0"
    folder.mkdir()
    (folder / "information").write_text(
        "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 152\nGPU UUID: \t GPU-5f1a\nDevice Minor: \t 0\n"
    )
    assert schema.gpu_name(tmp_path) == "NVIDIA A100-SXM4-40GB"
    assert Context.here(3, gpus=tmp_path).gpu == "NVIDIA A100-SXM4-40GB"
    assert Context.here(3, is_live=False, gpus=tmp_path).gpu is None


def test_nccl_is_known_by_its_packages_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(folder)])
    assert schema.nccl_version() is None
    (folder / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir(parents=True)
    assert schema.nccl_version() == "2.30.7"
