"""GPUs: the values that the driver (a stand-in) reports, and the findings on the GPUs of a job."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from muster.check.doctor import gpus
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import found, gpu, healthy, only, with_gpu, with_ranks


class NvmlError(Exception):
    """The exception that the stand-in raises."""


class Nvml(SimpleNamespace):
    """A stand-in for pynvml, as no GPU is here: an A100 with faults, and a GPU for which every query fails."""

    NVMLError = NvmlError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlMemory_v2 = 1, 0, 0x02000028

    def __init__(self, has_driver: bool = True) -> None:
        answers: dict[str, Any] = {
            "nvmlDeviceGetName": "NVIDIA A100-SXM4-40GB",
            "nvmlDeviceGetUUID": "GPU-12ab",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=40, free=30, used=10),
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
            # A lowered clock: the GPU is idle, at its power limit, and too hot.
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x40,
            "nvmlDeviceGetMigMode": [0, 0],
        }
        super().__init__(**{name: self._told(answer) for name, answer in answers.items()})
        self.has_driver = has_driver

    @staticmethod
    def _told(answer: Any) -> Any:
        def tell(handle: int, *_: Any) -> Any:
            if handle == 1:
                raise NvmlError
            return answer

        return tell

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NvmlError

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 1 or link >= 12:
            raise NvmlError
        return int(link != 3)


def test_what_the_driver_tells_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    told, driver = gpus.ask_driver()
    assert driver == "580.65.06"
    assert told is not None
    sick, silent = told
    assert (sick.name, sick.uuid, sick.used, sick.uncorrected) == ("NVIDIA A100-SXM4-40GB", "GPU-12ab", 10, 2)
    assert (sick.remapping, sick.slowed_by, sick.mig, sick.links) == ("pending", ("heat (hardware)",), False, 11)
    assert silent == gpus.Gpu(index=1)


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(has_driver=False))
    assert gpus.ask_driver() == (None, None)


GPUS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"uncorrected": 3}, "ecc", "failed", "3 since"),
    ({"remapping": "failed"}, "ecc", "failed", "failed"),
    ({"remapping": "pending"}, "ecc", "warning", "pending"),
    ({"used": 40 * 2**30}, "gpu memory", "warning", "40G used"),
    ({"slowed_by": ["heat (hardware)"]}, "gpu clock", "warning", "heat (hardware)"),
    ({"mig": True}, "mig", "warning", "enabled"),
    ({"links": 12}, "nvlink", "warning", "12 up, 18"),
]


@pytest.mark.parametrize(("changed", "about", "level", "seen"), GPUS, ids=lambda value: str(value)[:30])
def test_a_gpu_that_is_not_well(changed: dict[str, Any], about: str, level: str, seen: str) -> None:
    finding = only(with_gpu(healthy(), "node03", 1, **changed))
    assert (finding.host, finding.about, finding.level) == ("node03", about, level)
    assert "GPU 1" in finding.wrong
    assert seen in finding.seen


def test_a_gpu_that_the_job_was_not_given_does_not_matter() -> None:
    told = with_gpu(healthy(2, 2), "node01", 1, uncorrected=3)
    told = with_ranks(told, "node01", lambda rank: {"visible": "0", "num_gpus": 1})
    assert not [finding for finding in found(told) if finding.about == "ecc"]


def test_a_gpu_may_be_given_by_the_first_digits_of_its_uuid() -> None:
    told = with_gpu(with_gpu(healthy(1, 2), "node01", 0, uuid="GPU-ab12"), "node01", 1, uuid="GPU-cd34", uncorrected=3)
    assert found(with_ranks(told, "", lambda rank: {"visible": "GPU-ab", "num_gpus": 1})) == []
    assert found(with_ranks(told, "", lambda rank: {"visible": "GPU-cd", "num_gpus": 1})) != []


def test_of_several_parts_of_gpus_the_first_is_all_that_a_process_can_see() -> None:
    """MIG instances: a launch starts one rank for them, as CUDA shows a process only the first."""
    parts = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"
    told = with_ranks(healthy(1, 1), "", lambda rank: {"visible": parts, "num_gpus": 1})
    assert found(told) == []
    assert gpus.summary(told["GPUs"]) == "1 x NVIDIA H100 80GB HBM3 a node"


@pytest.mark.parametrize("visible", ["", "10000"])
def test_gpus_that_are_hidden_from_the_job_do_not_matter(visible: str) -> None:
    """By CUDA_VISIBLE_DEVICES= for a training on CPUs, or by HTCondor, which names a device that does not exist."""
    told = with_gpu(healthy(1, 2), "node01", 1, uncorrected=3, used=40 * 2**30)
    assert found(with_ranks(told, "", lambda rank: {"visible": visible, "num_gpus": 0, "uses_gpu": False})) == []


def test_ranks_to_which_only_their_own_gpu_is_shown() -> None:
    """As with Slurm's --gpus-per-task=1: for each rank its own GPU has index 0."""

    def shown(rank: Any) -> dict[str, Any]:
        return {"visible": "0", "num_gpus": 1, "gpus": (replace(gpu(0), uuid=f"GPU-{rank.rank}{'abcd'[rank.rank]}"),)}

    told = with_ranks(healthy(1, 4), "", lambda rank: shown(rank) if isinstance(rank, gpus.Facts) else {})
    assert found(told) == []
    assert gpus.summary(told["GPUs"]) == "4 x NVIDIA H100 80GB HBM3 a node"
    third = told["GPUs"]["node01"][2]
    told["GPUs"]["node01"][2] = replace(third, gpus=(replace(third.gpus[0], uncorrected=3),))
    assert (only(told).about, "GPU-2c" in only(told).wrong) == ("ecc", True)


def test_a_rank_with_a_gpu_of_its_own_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 1)
    second, alone = (World(rank=1, world_size=2, host="a", hosts=hosts) for hosts in (("a", "a"), ("b", "a")))
    own, of_node = (gpus.gather(world, DoctorOptions()) for world in (second, alone))
    assert [card.uuid for card in own.gpus or ()] == ["GPU-12ab"]
    assert len(of_node.gpus or ()) == 2
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 2)
    assert gpus.gather(second, DoctorOptions()).gpus is None


def test_gpus_of_another_kind() -> None:
    told = with_gpu(with_gpu(healthy(), "node02", 0, name="NVIDIA A100"), "node02", 1, name="NVIDIA A100")
    assert only(told).seen == "NVIDIA A100 on node02, NVIDIA H100 80GB HBM3 on node01, node03"


def test_one_gpu_fewer_than_elsewhere() -> None:
    told = with_ranks(healthy(), "node02", lambda rank: {"visible": "0", "num_gpus": 1})
    differs = only(told)
    assert (differs.host, differs.level, differs.seen) == ("node02", "failed", "1 on node02, 2 on node01, node03")


@pytest.mark.parametrize(("links", "num_found"), [(0, 0), (8, 1), (12, 0)])
def test_a_card_without_a_bridge_has_no_nvlinks_that_are_down(links: int, num_found: int) -> None:
    told = healthy(1, 2)
    for index, up in enumerate((12, links)):
        told = with_gpu(told, "node01", index, name="NVIDIA A100 80GB PCIe", links=up)
    assert [finding.about for finding in found(told)] == ["nvlink"] * num_found


def test_uneven_nodes_on_which_each_rank_has_a_gpu() -> None:
    told = healthy(2, 4)
    for by_host in told.values():
        by_host["node02"] = by_host["node02"][:2]
    told = with_ranks(told, "node02", lambda rank: {"visible": "0,1", "num_gpus": 2})
    (differs,) = [finding for finding in found(told) if finding.about == "gpus"]
    assert (differs.level, differs.seen) == ("warning", "4 on node01, 2 on node02")


def test_ranks_that_see_one_gpu_each() -> None:
    own = with_ranks(healthy(2), "", lambda rank: {"visible": str(getattr(rank, "rank", 0) % 2), "num_gpus": 1})
    assert found(own) == []
    blind = with_ranks(own, "node02", lambda rank: {"num_gpus": 1 - getattr(rank, "rank", 0) % 2})
    finding = only(blind)
    assert (finding.host, finding.level) == ("node02", "failed")
    assert finding.seen.startswith("CUDA_VISIBLE_DEVICES=1, ")


def test_gpus_that_torch_does_not_see() -> None:
    told = with_ranks(healthy(2), "", lambda rank: {"num_gpus": 0})
    assert (only(told).host, only(told).level) == ("node01, node02", "warning")


def test_a_gpu_that_torch_has_lost() -> None:
    """The scheduler still names it."""
    told = with_ranks(healthy(2, 4), "node02", lambda rank: {"num_gpus": 3})
    assert (only(told).host, only(told).level) == ("node02", "warning")
    assert only(told).seen == "CUDA_VISIBLE_DEVICES=0,1,2,3, and torch sees 3"


def test_gpus_that_are_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 0)
    world = World(host="a", hosts=("a",))
    (finding,) = gpus.findings({"a": [gpus.gather(world, DoctorOptions(device="cuda", quick=True))]})
    assert (finding.host, finding.level) == ("a", "failed")
    assert "--device=cuda" in finding.seen
    assert gpus.findings({"a": [gpus.gather(world, DoctorOptions())]}) == []
