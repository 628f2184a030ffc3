"""The wheel, installed into an environment of its own, beside a user's modules with the names that ours could have."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("entrypoint", "jobs", "muster", "train", "pyproject.toml", "README.md")

USERS = """
import sys
import check, entrypoint, image, jobs, muster_helpers, report, train
modules = (check, entrypoint, image, jobs, muster_helpers, report, train)
# One write: the ranks share a pipe.
sys.stdout.write(" ".join(module.WHOSE for module in modules) + "\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        f"--wheel-dir={folder}",
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=240)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands in an environment with the wheel, which borrows the other packages from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", f"--python={folder / 'bin' / 'python'}", *install], check=True, timeout=240
    )
    # Python reads no .pth files in folders that a .pth file adds: so the editable install of the clone has no effect.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A user's folder with a script, and modules with the names of our folders."""
    for name in ("check.py", "report.py", "muster_helpers.py"):
        (tmp_path / name).write_text("WHOSE = 'user'\n")
    for name in ("entrypoint", "image", "jobs", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WHOSE = 'user'\n")
    (tmp_path / "script.py").write_text(USERS)
    return tmp_path


def run(programs: Path, cwd: Path, *words: str) -> str:
    """The output of a command, with the user's folder as working directory and on PYTHONPATH."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    env = {**kept, "HOME": str(cwd), "PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(cwd), "COLUMNS": "80"}
    argv = [str(programs / words[0]), *words[1:]]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_one_top_level_name_and_all_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"muster"}
    listed = subprocess.run(["git", "ls-files", "jobs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {f"muster/{name}" for name in listed.split() if not name.endswith(".gitkeep")} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ("muster", "detect"),
        ("muster", "env"),
        ("muster", "fabric", "find", "--root", "/"),
        ("muster", "job", "slurm"),
        ("muster", "report", "--help"),
        ("muster", "site"),
        ("muster", "version"),
        ("train", "ddp", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_work_outside_the_clone_beside_a_users_modules(
    programs: Path, users: Path, words: tuple[str, ...]
) -> None:
    assert run(programs, users, *words)


@pytest.mark.process
def test_training_checks_and_a_users_script_work_beside_their_modules(programs: Path, users: Path) -> None:
    small = ("--device=cpu", "--data=synthetic", "--image-size=32", "--num-samples=64", "--max-steps=2", "--name=here")
    run(programs, users, "train", "ddp", *small)
    assert (users / "runs" / "here" / "summary.json").is_file()
    assert "here" in run(programs, users, "muster", "report", "runs/here")
    run(programs, users, "muster", "doctor", "--quick", "--device=cpu")
    said = run(programs, users, "muster", "run", "--nproc-per-node=2", "script.py").splitlines()
    assert said == [" ".join(["user"] * 7)] * 2


DEBIAN_WITHOUT_VENV = """#!/bin/sh
[ "$1" = -m ] || exit 0
cat << END
The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
package using the following command.

    apt install python3.11-venv

END
exit 1
"""


def test_a_python_without_venv_is_told_in_whole_words(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(DEBIAN_WITHOUT_VENV)
    python.chmod(0o755)
    words = [str(ROOT / "scripts/install.sh"), str(tmp_path / "venv"), "requirements.lock", str(python)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3
    assert "because ensurepip is not available.\n" in done.stderr
