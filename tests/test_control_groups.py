"""The memory and the cores that control groups leave to a process."""

from pathlib import Path

import pytest

from muster import control_groups
from muster.entrypoint import environment, resources
from muster.entrypoint.detect.allocation import NO_SCHEDULER
from muster.train.data.loader import count_cores
from muster.train.distributed.world import World


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str]) -> None:
    """Writes control groups into `folder`, and has them read as those of this process."""
    for name, text in {"groups": groups, **{f"root/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "GROUPS", folder / "groups")
    monkeypatch.setattr(control_groups, "ROOT", folder / "root")


@pytest.mark.parametrize(
    ("groups", "files", "free", "cores"),
    [
        # Version 2, in a container and in a job whose own group has the limits.
        (
            "0::/",
            {
                "memory.max": "4096",
                "memory.current": "3000",
                "memory.stat": "anon 2000\nactive_file 100\ninactive_file 900",
                "cpu.max": "150000 100000",
            },
            1996,
            1.5,
        ),
        (
            "0::/slurm/job_9/step_0",
            {
                "slurm/job_9/memory.max": "8192",
                "slurm/job_9/memory.current": "9000",
                "slurm/job_9/step_0/memory.max": "max",
                "slurm/job_9/step_0/memory.current": "100",
                "slurm/cpu.max": "max 100000",
            },
            0,
            None,
        ),
        # Version 1, in a container that has the host's paths, and without a limit.
        (
            "9:memory:/docker/1a2b\n4:cpu,cpuacct:/docker/1a2b\n0::/",
            {
                "memory/memory.limit_in_bytes": "4096",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 600",
                "cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3696,
            0.5,
        ),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None, None),
        ("0::/", {"memory.max": "4096"}, 4096, None),
        ("", {}, None, None),
    ],
)
def test_what_limits_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    free: int | None,
    cores: float | None,
) -> None:
    write(tmp_path, monkeypatch, groups, files)
    assert control_groups.available() == (free, cores)


def test_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "none")
    assert control_groups.available() == (None, None)


def test_threads_and_data_workers_have_no_more_cores_than_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod with a limit of one core, on a node where any core may be used."""
    write(tmp_path, monkeypatch, "0::/", {"cpu.max": "100000 100000"})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert resources.cores(environment.live(), NO_SCHEDULER) == 1
    assert count_cores(World()) == 1
    write(tmp_path, monkeypatch, "0::/", {"cpu.max": "max 100000"})
    assert resources.cores(environment.live(), NO_SCHEDULER) == 8
    assert count_cores(World()) == 8
