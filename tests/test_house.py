"""Rules that no other tool checks: imports between packages, contents of a wheel, links, targets of the Makefile."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH = {"torch", "numpy", "torchvision"}


def sources(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert found, folders
    return found


def imported(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def of(package: str, path: Path) -> set[str]:
    """The names that a file imports from one of our packages."""
    return {name for name in imported(path) if name == package or name.startswith(f"{package}.")}


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def test_launcher_and_trainer_do_not_know_each_other() -> None:
    for path in sources("train"):
        assert not of("muster.entrypoint", path), path
    for path in sources("entrypoint"):
        assert not of("muster.train", path), path


def test_torch_is_loaded_only_by_the_agent_and_nothing_loads_that() -> None:
    for path in sources("entrypoint"):
        if "agent" not in path.parent.name:
            assert not roots(path) & TORCH, path
            assert not of("muster.entrypoint.agent", path), path


@pytest.mark.parametrize("path", sorted((ROOT / "muster").glob("*.py")), ids=lambda path: path.name)
def test_what_both_sides_share_is_without_torch_and_knows_neither(path: Path) -> None:
    assert not roots(path) & TORCH
    assert not of("muster.train", path) | of("muster.entrypoint", path) | of("muster.check", path)


def test_the_trainer_takes_of_the_checks_only_the_quick_look_and_loads_it_when_asked() -> None:
    of_check = {path: of("muster.check", path) for path in sources("train")}
    assert {path.name for path, names in of_check.items() if names} == {"process.py"}
    top = ast.parse((ROOT / "train" / "process.py").read_text()).body
    modules = [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if name.startswith("muster.check")]


def test_checks_know_nothing_of_the_launcher_and_it_knows_only_their_options() -> None:
    for path in sources("muster/check"):
        assert not of("muster.entrypoint", path), path
    assert not roots(ROOT / "muster" / "check" / "options.py") & TORCH
    of_check = {name for path in sources("entrypoint") for name in of("muster.check", path)}
    assert of_check <= {
        "muster.check.options",
        "muster.check.options.BenchOptions",
        "muster.check.options.DoctorOptions",
    }


def test_the_report_reads_files_and_nothing_of_the_trainer() -> None:
    """It starts fast on any machine: without torch, and with matplotlib and rich only when they are needed."""
    for path in sources("muster/report"):
        assert not roots(path) & TORCH, path
        assert not of("muster.train", path) | of("muster.entrypoint", path), path
    for path in sources("entrypoint"):
        assert not of("muster.report", path), path


def test_building_the_image_needs_nothing_but_python() -> None:
    for path in sorted((ROOT / "image").rglob("*.py")):
        others = {name for name in imported(path) if name.split(".")[0] not in {*sys.stdlib_module_names, "image"}}
        assert others <= {"muster.errors", "muster.errors.MusterError"}, path
    assert roots(ROOT / "muster" / "errors.py") <= sys.stdlib_module_names


def test_a_wheel_has_every_package() -> None:
    """setuptools does not find packages behind links by itself, so they are listed."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in sources("muster", "entrypoint", "train")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == {name if name.startswith("muster") else f"muster.{name}" for name in names} | {"muster.jobs"}


def test_links_in_the_documents_lead_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    documents = [ROOT / name for name in listed.stdout.split()] or sorted(ROOT.glob("*.md"))
    assert ROOT / "README.md" in documents
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text()):
            page = (document.parent / target if target else document).read_text()
            headings = re.findall(r"^#+ (.*)", page, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{document.name}: {target}#{anchor}"


@pytest.mark.parametrize("target", ["check", "test", "train", "image", "sif"])
def test_only_test_setup_installs_system_packages(target: str) -> None:
    """Looks at the commands that make would run if nothing was built yet, and at the scripts among them."""
    words = ["make", "--always-make", "--dry-run", "--no-print-directory", f"--directory={ROOT}", target]
    env = {"PATH": "/usr/bin:/bin"}
    shown = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=True).stdout
    scripts = {ROOT / name for name in re.findall(r"^(?:scripts|image)/[\w-]+\.sh", shown, re.MULTILINE)}
    assert scripts
    for text in (shown, *(path.read_text() for path in scripts)):
        # A command that is only shown to the user stands in quotes.
        assert not re.search(r"^[^\"'\n]*\b(apt-get|dnf|yum|sudo|install-packages\.sh)\b", text, re.MULTILINE)


def test_the_list_of_targets_fits_in_a_terminal() -> None:
    words = ["make", "--no-print-directory", f"--directory={ROOT}", "help"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stdout.splitlines()
    assert len(shown) > 10
    assert [line for line in shown if len(line) > 80] == []
