"""A driver older than the installed torch: forward compatibility is used, or the launch refused in three lines.

No training may silently run on the CPU. The libraries are stand-ins, compiled here: real ones may answer otherwise.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.entrypoint import resources
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import driver
from muster.entrypoint.launch.driver import Driver, Toolkit
from muster.entrypoint.launch.program import Additions, Program
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import standins
from tests.entrypoint.conftest import clean_environment
from tests.entrypoint.test_cli import three_lines

Run = Callable[..., "subprocess.CompletedProcess[str]"]

INSTALLED = driver.version_file()
NEW = 13020
TRAINER = Program("module", ("train", "ddp"), is_ours=True)
ON_CPU = Program("module", ("train", "ddp", "--device=cpu"), is_ours=True)
SCRIPT = Program("script", ("mine.py",))
SHOW = """
import ctypes, os
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
print(version.value, *mapped, os.environ["LD_LIBRARY_PATH"])
"""


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a node without a driver or forward compatibility, and a torch built for CUDA 13.2."""
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(driver, "TOOLKITS", tmp_path / "local")
    monkeypatch.setattr(driver, "MODULE_VERSIONS", (tmp_path / "module",))
    monkeypatch.setattr(resources, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    monkeypatch.setattr(driver, "version_file", lambda: tmp_path / "version.py")
    return made(tmp_path)


def made(folder: Path, torch: str = "2.15.0+cu132", cuda: str | None = "13.2", module: str = "") -> Path:
    """Writes the version files of such a torch and, with the text `module`, of a driver to `folder`; returns it."""
    (folder / "version.py").write_text(f"__version__ = '{torch}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\n")
    (folder / "module").write_text(module)
    return folder


def checked(
    monkeypatch: pytest.MonkeyPatch, cuda: driver.Version | str, program: Program = TRAINER, **variables: str
) -> Additions:
    """The check of a simulated driver that supports `cuda`, or has this problem: only one libcuda can be loaded."""
    version = driver.find().version
    found = Driver(version, None, cuda) if isinstance(cuda, str) else Driver(version, cuda)
    monkeypatch.setattr(driver, "find", lambda: found)
    env = Environment({"CUDA_VISIBLE_DEVICES": "0,1", **variables}, host="node")
    return driver.check(resolve.resolve(env, LaunchOptions(), ["train", "ddp"]), env, program)


@pytest.mark.parametrize(
    ("torch", "cuda", "expected"),
    [
        ("2.15.0+cu132", "13.2", Toolkit("2.15.0", (13, 2))),
        ("2.10.0", "12.8", Toolkit("2.10.0", (12, 8))),
        ("2.15.0+cpu", None, None),
    ],
)
def test_torch_tells_its_cuda_without_being_loaded(
    tmp_path: Path, torch: str, cuda: str | None, expected: Toolkit | None
) -> None:
    assert driver.toolkit_of(made(tmp_path, torch, cuda) / "version.py") == expected


def test_the_installed_torch_tells_what_it_says_of_itself() -> None:
    code = """
import sys
from muster.entrypoint.launch import driver
found = driver.toolkit_of(driver.version_file())
assert "torch" not in sys.modules
import torch
print(found)
print(f"torch {torch.__version__.split('+')[0]} is built for CUDA {torch.version.cuda}" if torch.version.cuda else None)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    ours, its_own = answer.stdout.splitlines()
    assert ours == its_own


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("550.54.14\n", "550.54.14"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82  Release Build  (dvs@x1)\n", "580.82"),
        ("GCC version:  gcc version 12.3.0\n", None),
        ("", None),
    ],
)
def test_the_drivers_own_version(tmp_path: Path, text: str, version: str | None) -> None:
    made(tmp_path, module=text)
    assert driver.find().version == version


@pytest.mark.parametrize("cuda", [(13, 0), (13, 2), (14, 1)])
def test_a_driver_of_the_same_major_version_or_newer_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, cuda: driver.Version
) -> None:
    assert checked(monkeypatch, cuda) == Additions()


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        (ON_CPU, {}),
        (TRAINER, {"CUDA_VISIBLE_DEVICES": ""}),
        (Program("program", ("python", "main.py"), framework="jax"), {}),
    ],
)
def test_a_program_that_uses_no_gpu_by_torch_needs_no_driver(
    monkeypatch: pytest.MonkeyPatch, program: Program, variables: dict[str, str]
) -> None:
    assert checked(monkeypatch, (12, 4), program, **variables) == Additions()


def test_a_torch_without_cuda_needs_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(tmp_path, cuda=None)
    assert checked(monkeypatch, (12, 4)) == Additions()


@pytest.mark.parametrize("inherited", ["", "/a:/b", ":/a::/b:"])
def test_forward_compatibility_that_works_is_put_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inherited: str
) -> None:
    made(tmp_path, module="550.54.14\n")
    folder = standins.libcuda(tmp_path / "local" / "cuda" / "compat", NEW).parent
    found = checked(monkeypatch, (12, 4), LD_LIBRARY_PATH=inherited)
    assert found.variables == {"LD_LIBRARY_PATH": ":".join([str(folder), *filter(None, inherited.split(":"))])}
    (note,) = found.notes
    assert note.startswith("driver 550.54.14 supports CUDA 12.4, torch 2.15.0 is built for CUDA 13.2: ")
    assert note.endswith(f": the forward-compatibility library in {folder} is used")


@pytest.mark.parametrize(
    ("cuda", "code", "before", "why"),
    [
        (NEW, 803, "", "cuInit answers CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        (NEW, 804, "", "cuInit answers CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)"),
        (NEW, 719, "", "cuInit answers a CUDA error (719)"),
        (12080, 0, "", "it supports CUDA 12.8"),
        (NEW, 0, "_exit(7)", "a process that opened it ended with code 7"),
        (NEW, 0, "raise(40)", "a process that opened it was ended by signal 40"),
    ],
)
def test_forward_compatibility_that_does_not_work_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: int, code: int, before: str, why: str
) -> None:
    made(tmp_path, module="550.54.14\n")
    library = standins.libcuda(tmp_path / "local" / "cuda" / "compat", cuda, code, before)
    with pytest.raises(MusterError) as refused:
        checked(monkeypatch, (12, 4))
    wrong, seen, fix = three_lines(str(refused.value))
    assert "too old" in wrong
    assert seen.startswith("driver 550.54.14 supports CUDA 12.4, torch 2.15.0 is built for CUDA 13.2; ")
    assert seen.endswith(f"{library}: {why}")
    assert "requirements-cuda12.lock" in fix
    assert "--device cpu" in fix


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = driver.TOOLKITS / "cuda" / "compat" / "libcuda.so.1"
    path.parent.mkdir(parents=True)
    path.write_text("<!doctype html>\n" * 100)
    with pytest.raises(MusterError, match="too old") as refused:
        checked(monkeypatch, (12, 4))
    assert "invalid ELF header" in refused.value.seen


@pytest.mark.parametrize(
    ("cuda", "torch_cuda", "in_image", "fix"),
    [
        ((12, 0), "13.2", True, "make image VARIANT=cuda12: "),
        ((12, 0), "13.2", False, "install requirements-cuda12.lock: "),
        ((11, 8), "13.2", True, "ask for an NVIDIA driver of 525 or newer, and take the variant for CUDA 12"),
        ((11, 8), "12.8", True, "ask for an NVIDIA driver of 525 or newer; or"),
    ],
)
def test_what_helps_an_old_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: driver.Version, torch_cuda: str, in_image: bool, fix: str
) -> None:
    if in_image:
        (tmp_path / "image.json").write_text("{}")
    made(tmp_path, cuda=torch_cuda)
    with pytest.raises(MusterError, match="too old") as refused:
        checked(monkeypatch, cuda, SCRIPT)
    assert "no forward compatibility" in refused.value.seen
    assert refused.value.fix.startswith(fix)
    assert refused.value.fix.endswith("CUDA_VISIBLE_DEVICES= muster run")


def test_another_program_is_warned_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(monkeypatch, (12, 4), Program("program", ("./a.out",)))
    assert found.variables == {}
    assert "too old" in found.notes[0]


@pytest.mark.parametrize(("version", "code", "is_refused"), [("550.54.14", 804, True), ("550.54.14", 0, False)])
def test_forward_compatibility_that_somebody_else_put_first_is_proved_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, code: int, is_refused: bool
) -> None:
    made(tmp_path, module=version)
    folder = standins.libcuda(tmp_path / "first", NEW, code).parent
    if not is_refused:
        assert checked(monkeypatch, (13, 2), LD_LIBRARY_PATH=str(folder)) == Additions()
        return
    with pytest.raises(MusterError, match="too old") as refused:
        checked(monkeypatch, (13, 2), LD_LIBRARY_PATH=str(folder))
    assert refused.value.seen.startswith("driver 550.54.14 supports CUDA 12, ")
    assert "(804)" in refused.value.seen


def test_the_newest_forward_compatibility_by_the_name_a_user_knows(tmp_path: Path) -> None:
    for folder, file in (("cuda-12.8", "libcuda.so.570.86.15"), ("cuda-13.2", "libcuda.so.595.45.04")):
        compat = driver.TOOLKITS / folder / "compat"
        compat.mkdir(parents=True)
        (compat / file).write_text("")
        (compat / "libcuda.so.1").symlink_to(file)
    (driver.TOOLKITS / "cuda").symlink_to("cuda-13.2")
    assert driver.newest_compat() == driver.TOOLKITS / "cuda" / "compat" / "libcuda.so.1"
    (driver.TOOLKITS / "cuda").unlink()
    assert driver.newest_compat() == driver.TOOLKITS / "cuda-13.2" / "compat" / "libcuda.so.1"


def test_a_driver_that_hangs_is_told_by_its_deadline(tmp_path: Path) -> None:
    library = standins.libcuda(tmp_path, NEW, before="pause()")
    with pytest.raises(MusterError, match="does not answer to cuInit") as refused:
        driver.prove(str(library), 13, clean_environment(), timeout_s=0.5)
    assert refused.value.seen == f"{library}: no answer within 0.5 s"


def test_no_library_and_no_device_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(monkeypatch, "libcuda.so.1: cannot open shared object file")
    assert found.variables == {}
    assert "--nv" in found.notes[0]


def test_no_library_but_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (resources.DEVICES / name).touch()
    with pytest.raises(MusterError, match="no NVIDIA driver library") as refused:
        checked(monkeypatch, "libcuda.so.1: cannot open shared object file")
    assert refused.value.seen == (
        f"{resources.DEVICES}/nvidia0 {resources.DEVICES}/nvidia1; libcuda.so.1: cannot open shared object file"
    )
    assert "--nv" in refused.value.fix
    assert "--device cpu" in refused.value.fix
    assert checked(monkeypatch, "none", ON_CPU) == Additions()


@pytest.fixture
def old(tmp_path: Path) -> dict[str, str]:
    """The variables of a node whose driver is older than the installed torch: CUDA 12.4 for CUDA 13."""
    toolkit = driver.toolkit_of(INSTALLED)
    major = toolkit.cuda[0] if toolkit else 13
    folder = standins.libcuda(tmp_path / "driver", (major - 1) * 1000 + 40).parent
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.process
def test_the_command_refuses_what_would_train_on_the_cpu(command: Run, tmp_path: Path, old: dict[str, str]) -> None:
    if driver.toolkit_of(INSTALLED) is None or list(Path("/usr/local").glob("cuda*/compat/libcuda.so.1")):
        pytest.skip("needs a torch with CUDA, and no forward compatibility installed")
    (tmp_path / "mine.py").write_text("raise SystemExit('it was started')")
    answer = command("muster", "run", "mine.py", cwd=tmp_path, env=old)
    assert answer.returncode == 2
    assert "no forward compatibility" in three_lines(answer.stderr)[1]
    dry = command("muster", "run", "--dry-run", "mine.py", cwd=tmp_path, env=old)
    assert (dry.returncode, dry.stderr) == (0, "")
    hidden = command(
        "muster", "run", "--nproc-per-node=1", "mine.py", cwd=tmp_path, env={**old, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert "it was started" in hidden.stderr


@pytest.mark.process
def test_the_program_loads_the_forward_compatibility(tmp_path: Path, old: dict[str, str]) -> None:
    folder = standins.libcuda(tmp_path / "local" / "cuda" / "compat", NEW).parent
    made(tmp_path)
    (tmp_path / "mine.py").write_text(SHOW)
    # The whole command, but with other folders to search, as a test must not change /usr/local.
    code = f"""
import sys
from pathlib import Path
from muster.entrypoint import cli
from muster.entrypoint.launch import driver
driver.version_file = lambda: Path({str(tmp_path / "version.py")!r})
driver.TOOLKITS = Path({str(tmp_path / "local")!r})
sys.argv = ["muster", "run", "mine.py"]
cli.muster()
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**clean_environment(), **old}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == [str(NEW), str(folder / "libcuda.so.1"), f"{folder}:{old['LD_LIBRARY_PATH']}"]
    assert answer.stderr.splitlines()[-1].endswith(f": the forward-compatibility library in {folder} is used")


def test_a_driver_in_words() -> None:
    assert str(Driver("550.54.14", (12, 4))) == "driver 550.54.14"
    assert str(Driver(None, (12, 4))) == "the driver"
