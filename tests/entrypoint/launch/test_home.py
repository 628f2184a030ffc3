"""HOME, USER and TMPDIR for a container that has none, and tini for a command that is process 1."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import psutil
import pytest

from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.launch.home import find
from muster.entrypoint.launch.program import Additions, Folder, Launch
from muster.errors import MusterError
from tests.clusters.requirements import require_programs, require_unshare
from tests.entrypoint.conftest import COMMANDS, clean_environment
from tests.entrypoint.launch.test_start import planned

UID = os.getuid()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only temporary folder there is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("muster.entrypoint.launch.home.TEMPORARY", (folder,))
    return folder


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates that this user has no line in /etc/passwd."""

    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)


def inside(engine: str | None = "docker", **variables: str) -> Environment:
    return Environment(variables, "box", is_live=True, engine=engine)


def test_what_works_is_never_touched(tmp_path: Path, temporary: Path) -> None:
    found = find(inside(HOME=str(tmp_path), USER="me", TMPDIR=str(temporary)))
    assert found == Additions()


def test_home_and_name_for_a_user_without_an_entry(temporary: Path, unknown: None) -> None:
    found = find(inside(HOME="/"))
    home = temporary / f"muster-home-{UID}"
    assert found.variables == {"HOME": str(home), "USER": str(UID), "LOGNAME": str(UID)}
    (folder,) = found.folders
    assert folder.path == home
    assert not home.exists()
    folder.make()
    assert home.stat().st_mode & 0o7777 == 0o700
    # The next process finds the folder, and uses it.
    assert find(inside(HOME="/")).folders == (folder,)
    folder.make()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_private_folder_has_the_same_mode_under_every_umask(temporary: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Folder(temporary / "home", "", is_private=True).make()
    finally:
        os.umask(before)
    assert (temporary / "home").stat().st_mode & 0o7777 == 0o700


def test_a_folder_is_found_again_in_a_project_folder_whose_group_it_inherits(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    for _ in range(2):
        Folder(tmp_path / "home", "", is_private=True).make()
    assert (tmp_path / "home").stat().st_mode & 0o7777 == 0o2700


# The system refuses a name that is too long, as it refuses a path that this user may not enter.
@pytest.mark.parametrize("home", ["/nonexistent", "/etc/passwd", "", "/" + "a" * 300])
def test_a_home_that_cannot_be_written_to(temporary: Path, unknown: None, home: str) -> None:
    found = find(inside(HOME=home, USER="me"))
    assert found.variables == {"HOME": str(temporary / f"muster-home-{UID}")}
    assert len(found.notes) == 1
    assert home in found.notes[0]


def test_a_user_with_an_entry_keeps_its_name(temporary: Path) -> None:
    assert find(inside(HOME="/nonexistent")).variables.keys() == {"HOME"}


def test_outside_of_containers_and_for_recordings_nothing_changes(temporary: Path, unknown: None) -> None:
    for env in (inside(engine=None, HOME="/"), replace(inside(HOME="/"), is_live=False)):
        assert "HOME" not in planned(env).additions.variables


def link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def foreign(path: Path) -> None:
    if UID:
        pytest.skip("needs root")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("plant", [link, open_to_all, foreign, Path.touch])
def test_what_others_put_there_is_not_used(temporary: Path, plant: Callable[[Path], object]) -> None:
    home = temporary / f"muster-home-{UID}"
    plant(home)
    (folder,) = find(inside(HOME="/")).folders
    assert folder.path == home
    with pytest.raises(MusterError, match="belongs to another user") as refusal:
        folder.make()
    assert str(home) in refusal.value.seen


def test_without_a_temporary_folder_it_is_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: None
) -> None:
    monkeypatch.setattr("muster.entrypoint.launch.home.TEMPORARY", (Path("/nonexistent"),))
    monkeypatch.setattr("muster.entrypoint.launch.home.SHARED_MEMORY", tmp_path)
    found = find(inside(HOME="/", USER="me"))
    assert found.variables == {"TMPDIR": str(tmp_path), "HOME": str(tmp_path / f"muster-home-{UID}")}
    assert "--tmpfs /tmp" in found.notes[0]
    # A folder of the user's that works is enough.
    (tmp_path / "own").mkdir()
    assert "TMPDIR" not in find(inside(HOME="/", TMPDIR=str(tmp_path / "own"))).variables


def test_with_no_folder_at_all_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.entrypoint.launch.home.TEMPORARY", (Path("/nonexistent"),))
    monkeypatch.setattr("muster.entrypoint.launch.home.SHARED_MEMORY", Path("/nonexistent"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MusterError, match="can be written to") as refusal:
        find(inside(HOME="/"))
    assert "--tmpfs" in refusal.value.fix


def test_the_launch_has_them(temporary: Path, unknown: None) -> None:
    found = planned(inside(HOME="/"))
    assert found.additions.variables["HOME"] == str(temporary / f"muster-home-{UID}")
    assert found.additions.variables["USER"] == str(UID)
    assert [folder.path for folder in found.additions.folders] == [temporary / f"muster-home-{UID}"]
    assert any("HOME" in note for note in found.additions.notes)


def test_a_program_of_a_user_that_nobody_knows_finds_a_home(tmp_path: Path) -> None:
    someone = ("--user", "--map-user=54321", "--map-group=54321")
    require_unshare(*someone)
    script = tmp_path / "who.py"
    script.write_text("import getpass, os\nprint(getpass.getuser(), os.getuid(), os.path.expanduser('~'))\n")
    env = {**clean_environment(), "HOME": "/", "TMPDIR": str(tmp_path), "APPTAINER_CONTAINER": "/image.sif"}
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        env.pop(name, None)
    answer = subprocess.run(
        ["unshare", *someone, COMMANDS / "muster", "run", *ONE, script],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["54321", "54321", str(tmp_path / "muster-home-54321")]
    assert "HOME=" in answer.stderr


ONE = ("--nproc-per-node=1", "--nnodes=1")
FIRST = ("--pid", "--fork", "--kill-child", "--mount-proc")
WAIT = """
import os, signal
# As in a program that knows nothing of signals: the default action of SIGTERM.
print("ready", os.getpid(), flush=True)
signal.pause()
"""


def first_of_its_container(script: Path, env: Mapping[str, str]) -> "subprocess.Popen[str]":
    """`muster run` as process 1 of a PID namespace."""
    unshare = shutil.which("unshare")
    assert unshare
    words = [unshare, *FIRST, str(COMMANDS / "muster"), "run", *ONE]
    return subprocess.Popen(
        [*words, str(script)],
        env={**clean_environment(), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(stream: IO[str] | None) -> list[str]:
    assert stream
    return stream.readline().split()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_sigterm_ends_process_1_where_tini_is_there(tmp_path: Path) -> None:
    require_programs("tini")
    require_unshare(*FIRST)
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    process = first_of_its_container(script, {})
    try:
        word, pid = line(process.stdout)
        assert word == "ready"
        assert pid != "1"
        (first,) = psutil.Process(process.pid).children()
        assert first.name() == "tini"
        first.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM, said
        assert "process 1" not in said
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_without_tini_a_line_says_so(tmp_path: Path) -> None:
    require_unshare(*FIRST)
    script = tmp_path / "ends.py"
    script.write_text("import os\nprint('ready', os.getpid())\n")
    # tini is in neither of these folders.
    process = first_of_its_container(script, {"PATH": f"{tmp_path}:{Path(sys.executable).parent}"})
    try:
        out, said = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert out.split() == ["ready", "1"]
    assert "this is process 1, with no tini" in said


def test_tini_starts_the_command_only_for_process_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tini").write_text("#!/bin/sh\n")
    (tmp_path / "tini").chmod(0o755)
    execd: list[list[str]] = []
    # A real exec would end this test.
    monkeypatch.setattr(os, "execvpe", lambda file, argv, env: execd.append(argv))
    env = inside(PATH=str(tmp_path))
    for pid in (2, 1):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        start.execute(Launch(("train", "-x")), env)
    assert execd == [["train", "-x"], ["tini", "--", "train", "-x"]]
