"""README.md and docs/contributing.md: a test runs each command in them, and the files that they name exist."""

import re
import sys
from pathlib import Path

import pytest

from muster.entrypoint.detect import manual
from tests.docs import pages, running
from tests.docs.running import ROOT

README = ROOT / "README.md"
CONTRIBUTING = ROOT / "docs" / "contributing.md"

# Commands that are not run from the page itself: the file that runs each, and the text there that does so.
ELSEWHERE = {
    "make sif": ("tests/image/conftest.py", '"sif.sh"'),
    "make check": ("tests/lanes.py", '"check"'),
    "make test": ("Makefile", "python -m tests.lanes quick"),
    "make test-all": ("Makefile", "python -m tests.lanes all"),
    "make test-setup": (".ci/run", "make test-setup"),
    "make test-long": ("benchmarks/RESULTS.md", "make test-long"),
    "make test TESTS=tests/entrypoint": (".ci/run", "test-all"),
    "make test TESTS=tests/sites": (".ci/run", "test-all"),
    "make mutants": ("benchmarks/RESULTS.md", "python -m tests.mutants"),
    "make gpu": ("tests/test_gpu_runner.py", 'benchmarks" / "gpu" / "runner.py'),
    "make tour": ("tests/test_tour.py", "tour.follow"),
    "make jobs": ("tests/jobs/test_making.py", "make jobs"),
    "train ddp": ("tests/train/test_train.py", '"ddp"'),
    "muster run": ("tests/entrypoint/test_cli.py", 'command("muster", "run", '),
    "muster detect --record FILE": ("tests/entrypoint/test_cli.py", '"--record"'),
    "muster site": ("tests/sites/test_commands.py", '"site"'),
    "muster site mysite.toml": ("tests/sites/test_commands.py", '"site", str(path)'),
    "muster job NAME": ("tests/entrypoint/detect/test_families.py", 'making.make("drum"'),
    "train NAME": ("tests/train/parallel/test_strategies.py", '["echo", *argv'),
    "train selftest": ("tests/train/test_selftest.py", "selftest"),
    "muster job ./mysite.toml": ("tests/jobs/test_commands.py", ".toml"),
}
COMMAND = re.compile(r"`((?:make|train|muster|docker|podman|srun|sbatch|mpirun|apptainer|env) [^`]*)`")


def test_what_is_to_be_added_has_its_place() -> None:
    named = re.findall(r"`((?:entrypoint|train|muster|tests|jobs)/[\w/.]+)`", CONTRIBUTING.read_text())
    assert len(named) >= 8
    assert [name for name in named if not (ROOT / name.partition("NAME")[0]).exists()] == []


def test_every_variable_of_an_unknown_launcher_is_explained() -> None:
    page = (ROOT / "docs" / "decisions" / "detection.md").read_text()
    told = set(re.findall(r"`(\w+)`", page.partition("| Variable |")[2]))
    names = {*manual.NUMBERS, *manual.LISTS, *manual.TEXT_FILES}
    assert names - told == set()
    assert {name for name in told if name.isupper()} - names == set()


@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_commands_for_a_laptop(tmp_path: Path) -> None:
    """In a folder with the files of a clone and the existing environment, so that nothing is installed."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv" / ".runtime-installed").touch()

    def execute(script: Path, folder: Path) -> str:
        return running.locally(script, folder, timeout_s=540, env={"ARGS": "--max-steps=2"})

    wrong = running.check(pages.read(README), tmp_path, execute=execute)
    assert not wrong, "\n\n".join(wrong)


def test_the_launches_of_docs_use_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").touch()
    page = pages.read(ROOT / "docs" / "use.md")
    assert page.commands("dry")
    wrong = running.check(page, tmp_path, "dry")
    assert not wrong, "\n\n".join(wrong)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    found = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in found if f"({name})" not in index] == []


def test_every_command_is_run_by_some_test() -> None:
    page = pages.read(README)
    kinds = {block.kind for block in page.blocks if block.commands()}
    runs = (ROOT / "tests" / "image" / "test_readme.py").read_text()
    assert all(f'"{kind}"' in runs for kind in kinds - {"", "none"})
    run = {command.text for kind in kinds - {"none"} for command in page.commands(kind)}
    named = {command.text for command in page.commands("none")} | set(
        COMMAND.findall(README.read_text() + CONTRIBUTING.read_text())
    )
    assert named - run == ELSEWHERE.keys()
    for text, (where, essential) in ELSEWHERE.items():
        place = ROOT / where
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        assert any(essential in file.read_text() for file in files), f"{where} does not run: {text}"
