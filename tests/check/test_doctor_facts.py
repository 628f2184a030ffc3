"""What a rank tells of itself on this machine, and what a driver tells of GPUs, by a stand-in for it."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from muster import ROOT
from muster.check.doctor import gpus, memory, network, software, storage, storage_probe
from muster.check.options import DoctorOptions
from muster.train.world import World
from tests.check.healthy import SUBJECTS, healthy

SECOND = World(rank=1, world_size=2, host="b", hosts=("a", "b"))
"""The first rank of the second host."""


def test_a_rank_tells_of_itself_and_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_NET": "IB", "AWS_SECRET": "hush", "MUSTER_FABRIC_FOUND": "tcp"}.items():
        monkeypatch.setenv(name, value)
    options = DoctorOptions(checkpoint_dir=str(tmp_path / "runs" / "later"), device="cpu")
    installed = software.gather(SECOND, options)
    assert installed is not None
    assert installed.torch == str(torch.__version__)
    assert installed.code == software.code(ROOT)
    assert f"torch {metadata.version('torch')}" in (installed.packages or ())
    assert installed.variables["NCCL_NET"] == "IB"
    assert "AWS_SECRET" not in installed.variables
    assert memory.gather(SECOND, options).cores
    assert gpus.gather(SECOND, options) == gpus.Facts(rank=1)
    told = storage.gather(SECOND, options)
    assert told is not None
    assert (told.checkpoints.path, told.checkpoints.trouble, told.num_ranks) == (str(tmp_path), None, 2)
    assert network.gather(SECOND, options).fabric == "tcp"


def test_only_the_first_rank_of_a_host_tells_of_it() -> None:
    second, options = World(rank=1, world_size=2, host="a", hosts=("a", "a")), DoctorOptions(device="cpu")
    assert (software.gather(second, options), storage.gather(second, options)) == (None, None)
    assert memory.gather(second, options).shm is None
    assert network.gather(second, options).interfaces == ()


def test_facts_survive_json() -> None:
    for subject in SUBJECTS:
        for ranks in healthy()[subject.NAME].values():
            for facts in ranks:
                told = json.loads(json.dumps(msgspec.to_builtins(facts)))
                assert msgspec.convert(told, subject.Facts) == facts


def test_an_image_tells_its_version_and_lock(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text('{"version": "1.2.0", "revision": "abc", "lock_sha256": "d"}')
    found = software.gather_from(tmp_path)
    assert (found.image, found.revision, found.lock) == ("1.2.0", "abc", "d")
    (tmp_path / "image.json").write_text("{")
    assert software.gather_from(tmp_path).image is None


def test_a_checkout_tells_the_lock_of_its_torch_and_its_own_files(tmp_path: Path) -> None:
    lock = f"torch==0.1 \\\n\ntorch=={torch.__version__.partition('+')[0]} \\\n"
    (tmp_path / "requirements.lock").write_text(lock)
    assert software.gather_from(tmp_path).lock == hashlib.sha256(lock.encode()).hexdigest()
    (tmp_path / "requirements.lock").write_text("torch==0.1 \\\n")
    assert software.lock(tmp_path) is None
    before = software.code(tmp_path)
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "x.py").write_text("1")
    assert software.code(tmp_path) != before


def test_a_look_that_fails_costs_only_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError

    for module, name in (
        (network, "own_addresses"),
        (network, "ports"),
        (network, "towards"),
        (software, "packages"),
    ):
        monkeypatch.setattr(module, name, fail)
    assert network.gather(SECOND, DoctorOptions()).address is None
    installed = software.gather(SECOND, DoctorOptions())
    assert installed is not None
    assert installed.packages is None
    assert installed.torch


def test_the_room_in_a_folder(tmp_path: Path) -> None:
    found = storage_probe.measure(str(tmp_path / "new" / "folder"))
    assert found["path"] == str(tmp_path)
    assert 0 < found["free"] <= found["size"]
    assert "trouble" not in found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert storage.measure(str(tmp_path / "file" / "runs")).trouble == "Not a directory"


def test_a_file_system_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    assert storage.measure(str(tmp_path), limit_s=0).trouble == "the file system did not answer within 0 s"


class NvmlError(Exception):
    """What the stand-in raises."""


class Nvml(SimpleNamespace):
    """A stand-in for pynvml, as no GPU is here: one A100 that is not well, and one of which nothing can be told."""

    NVMLError = NvmlError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_CLOCK_SM, nvmlMemory_v2 = 1, 0, 1, 0x02000028

    def __init__(self, has_driver: bool = True) -> None:
        answers: dict[str, Any] = {
            "nvmlDeviceGetName": "NVIDIA A100-SXM4-40GB",
            "nvmlDeviceGetUUID": b"GPU-12ab",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=40, free=30, used=10),
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
            "nvmlDeviceGetClockInfo": 300,
            "nvmlDeviceGetMaxClockInfo": 1410,
            # Idle, by a power limit, and too hot.
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

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 1 or link >= 12:
            raise NvmlError
        return int(link != 3)


def test_what_the_driver_tells_of_gpus() -> None:
    told, driver = gpus.ask_driver(Nvml())
    assert driver == "580.65.06"
    assert told is not None
    sick, silent = told
    assert (sick.name, sick.uuid, sick.used, sick.uncorrected) == ("NVIDIA A100-SXM4-40GB", "GPU-12ab", 10, 2)
    assert (sick.remapping, sick.slowed_by, sick.mig, sick.links) == ("pending", ("heat (hardware)",), False, 11)
    assert (sick.clock_mhz, sick.max_clock_mhz) == (300, 1410)
    assert silent == gpus.Gpu(index=1)


def test_without_a_driver_there_are_no_gpus() -> None:
    assert gpus.ask_driver(Nvml(has_driver=False)) == (None, None)
