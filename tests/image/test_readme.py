"""README's commands for the image and for Slurm, typed as they stand there.

`docker` is podman here, which has docker's options. It and Apptainer are on PATH; the files of a clone are at hand.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clusters.slurm import WAITED, SlurmCluster
from tests.clusters.weights import ONE_THREAD, summary
from tests.docs import pages, running
from tests.docs.running import ROOT
from tests.image.conftest import FIRST_TEST_S
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.timeout(FIRST_TEST_S)]

README = pages.read(ROOT / "README.md")


def program(folder: Path, name: str, *words: object) -> None:
    """Makes a program called `name` in `folder` that runs these words."""
    path = folder / name
    path.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + ' "$@"\n')
    path.chmod(0o755)


def test_with_docker(image: str, build_env: dict[str, str], tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs, "docker", "/usr/bin/podman")
    # The base image exists already, so no registry is asked, and the layers of the other tests' image are used.
    env = {**build_env, "PATH": f"{programs}:{build_env['PATH']}"}
    # A user's make is not started by another make, as these tests may be.
    env = {name: value for name, value in env.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}

    def execute(script: Path, folder: Path) -> str:
        done = subprocess.run(["bash", script], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=1500)
        return done.stdout

    wrong = running.check(README, tmp_path, "image", execute)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.cluster
def test_on_slurm(slurm2: SlurmCluster, image_sif: Sif, tmp_path: Path) -> None:
    program(tmp_path, "apptainer", image_sif.apptainer)
    folder = slurm2.shared / "readme"
    folder.mkdir()
    (folder / "muster.sif").symlink_to(image_sif.path)
    env: Mapping[str, str] = image_sif.env(**ONE_THREAD)
    env = {**env, "PATH": f"{tmp_path}:{env['PATH']}"}
    wrote: list[str] = []

    def execute(script: Path, folder: Path) -> str:
        wrote.append(WAITED.sub("", slurm2.run("bash", script, cwd=folder, env=env, timeout=600).stdout))
        return wrote[0]

    wrong = running.check(README, folder, "slurm", execute)
    assert not wrong, "\n\n".join(wrong)
    submitted = re.search(r"Submitted batch job (\d+)", wrote[0])
    assert submitted, wrote
    job = slurm2.job(submitted[1]).wait(300)
    assert job.state == "COMPLETED", job.output
    found = summary(folder / "runs" / f"muster-{job.id}")
    assert (found["world_size"], sorted(found["hosts"])) == (4, ["node01", "node02"])
