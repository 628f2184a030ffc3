"""The commands of the tutorials for Slurm, in a real one on fake hosts. tests/image runs README's, with the SIF."""

from pathlib import Path

import pytest

from tests.clusters.namespaces import PATH
from tests.clusters.slurm import WAITED, SlurmCluster
from tests.docs import pages, running
from tests.docs.running import BIN, ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DOCUMENTS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [path for path in DOCUMENTS if "<!-- test: slurm -->" in path.read_text()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_its_commands_do_what_it_says(slurm2: SlurmCluster, path: Path) -> None:
    folder = slurm2.shared / f"page-{path.stem}"
    folder.mkdir()

    def execute(script: Path, folder: Path) -> str:
        env = {"PATH": f"{BIN}:{PATH}", "COLUMNS": "80", **running.paths()}
        return WAITED.sub("", slurm2.run("bash", script, cwd=folder, env=env, timeout=400).stdout)

    wrong = running.check(pages.read(path), folder, "slurm", execute)
    assert not wrong, "\n\n".join(wrong)
