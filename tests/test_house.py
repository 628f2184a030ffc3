"""Rules of the house that no other tool holds: who imports whom, how long a file may get."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_trainer_knows_nothing_of_the_entrypoint() -> None:
    assert sources("train")
    for path in sources("train"):
        assert not {name for name in imported(path) if name.split(".")[0] == "entrypoint"}, path


def test_the_trainer_takes_of_the_checks_only_the_quick_look_and_loads_it_when_asked() -> None:
    of_check = {path: {name for name in imported(path) if name.split(".")[0] == "check"} for path in sources("train")}
    assert {path.name for path, names in of_check.items() if names} == {"process.py"}
    assert of_check[ROOT / "train" / "process.py"] == {"check.doctor.quick", "check.doctor.quick.preflight"}
    top = ast.parse((ROOT / "train" / "process.py").read_text()).body
    assert not [node for node in top if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("check")]


def test_the_entrypoint_knows_of_the_trainer_only_its_options_and_errors() -> None:
    allowed = re.compile(r"train\.(arguments|inputs|options|errors|combinations|plan.hardware)(\.\w+)?")
    for path in sources("entrypoint"):
        of_train = {name for name in imported(path) if name.split(".")[0] == "train"}
        assert not {name for name in of_train if not allowed.fullmatch(name)}, path


def test_torch_is_loaded_only_by_what_is_execd_and_nothing_loads_that() -> None:
    heavy = {"torch", "numpy", "torchvision"}
    execd = {"agent", "last_words", "node_beats", "roll_call", "supervision", "spawn"}
    for path in sources("entrypoint"):
        roots = {name.split(".")[0] for name in imported(path)}
        if path.stem in execd:
            assert not roots & {"entrypoint", "train"}, path
        else:
            assert not roots & heavy, path
            assert not imported(path) & {f"entrypoint.{name}" for name in execd}, path


@pytest.mark.parametrize(
    "name", ["arguments.py", "inputs.py", "options.py", "errors.py", "combinations.py", "plan/hardware.py"]
)
def test_what_the_entrypoint_reads_of_the_trainer_is_without_torch(name: str) -> None:
    assert not {module for module in imported(ROOT / "train" / name) if module.split(".")[0] in ("torch", "numpy")}


def test_building_the_image_needs_nothing_but_python() -> None:
    assert sources("image")
    for path in sources("image"):
        others = {name for name in imported(path) if name.split(".")[0] not in {*sys.stdlib_module_names, "image"}}
        assert others <= {"train.errors", "train.errors.MusterError"}, path
    assert not imported(ROOT / "train" / "errors.py")


def test_what_looks_at_an_installation_is_of_neither_side() -> None:
    """What needs ranks is of the side that is exec'd, and takes from the trainer how ranks meet and end."""
    allowed = re.compile(r"train(\.(arguments|inputs|errors|world|backends|console|faults|logs)(\.\w+)?)?")
    assert sources("check")
    for path in sources("check"):
        names = imported(path)
        assert "entrypoint" not in {name.split(".")[0] for name in names}, path
        of_train = {name for name in names if name.split(".")[0] == "train"}
        is_alone = path.parent.name == "check" and path.name in ("fabric.py", "loaded.py", "versions.py")
        assert not {name for name in of_train if is_alone or not allowed.fullmatch(name)}, path
    of_check = {name for path in sources("entrypoint") for name in imported(path) if name.split(".")[0] == "check"}
    assert of_check <= {"check.options", "check.options.BenchOptions", "check.options.DoctorOptions"}
    assert not {name.split(".")[0] for name in imported(ROOT / "check" / "options.py")} & {"torch", "numpy"}


def test_the_report_reads_files_and_nothing_of_the_trainer_but_its_errors() -> None:
    """It starts fast, wherever the files are: without torch, and with matplotlib and rich when they are needed."""
    assert sources("report")
    for path in sources("report"):
        names = imported(path)
        assert not {name.split(".")[0] for name in names} & {"torch", "numpy", "torchvision", "entrypoint"}, path
        allowed = {"train.errors", "train.errors.MusterError", "train.errors.one_line"}
        assert {name for name in names if name.split(".")[0] == "train"} <= allowed, path
    for path in sources("entrypoint"):
        assert "report" not in {name.split(".")[0] for name in imported(path)}, path


def test_no_file_grows_past_its_size() -> None:
    for path in sources("entrypoint", "train", "report", "check", "image", "benchmarks", "tests"):
        assert len(path.read_text().splitlines()) <= 320, path


def test_links_in_the_documents_lead_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    documents = [ROOT / name for name in listed.stdout.split()] or sorted(ROOT.glob("*.md"))
    assert ROOT / "README.md" in documents
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
