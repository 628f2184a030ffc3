"""`muster report`, as its users start it: what it prints, writes and refuses."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from report.__main__ import main, report
from tests.report.conftest import Make
from train.errors import MusterError

ROOT = Path(__file__).resolve().parents[2]


def muster(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`muster report` with `arguments`, in the folder `cwd`."""
    code = f"import sys; sys.argv = ['muster', 'report', *{arguments!r}]; from entrypoint.cli import muster; muster()"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def size(png: Path) -> tuple[int, int]:
    """Width and height of a real PNG file, which is whole."""
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", data[16:24])


def test_tables_plots_and_page_of_recorded_runs(recordings: Path, tmp_path: Path) -> None:
    answer = muster(*(str(recordings / "scale" / name) for name in ("w1", "w2", "w4")), cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert max(map(len, answer.stdout.splitlines())) <= 80
    for said in ("Weak scaling: resnet18 on digits, ddp", "efficiency", "Efficiency = rate(W) / (W/W0 x rate(W0))"):
        assert said in answer.stdout
    # Several runs: the report is here, and the last lines say so.
    assert "report/index.html" in answer.stdout.splitlines()[-2]
    made = {path.name for path in (tmp_path / "report").iterdir()}
    plots = {"loss.png", "accuracy.png", "scaling-rate.png", "scaling-efficiency.png"}
    assert made == {"index.html", *plots}
    for name in plots:
        width, height = size(tmp_path / "report" / name)
        assert width >= 1000
        assert height >= 600


def test_recorded_runs_that_measured_more_have_all_plots(recordings: Path, tmp_path: Path) -> None:
    page = report([str(recordings / "measured")], tmp_path / "out")
    plots = {path.name for path in page.parent.glob("*.png")}
    over_steps = {"accuracy.png", "loss.png", "memory.png", "step-times.png", "throughput.png", "time.png"}
    assert plots == over_steps | {"scaling-rate.png", "scaling-efficiency.png"}


def test_a_run_that_measured_more_has_more_plots(measured: Path) -> None:
    page = report([str(measured)], None)
    assert page == measured / "report" / "index.html"
    plots = sorted(path.name for path in page.parent.glob("*.png"))
    assert plots == ["accuracy.png", "loss.png", "memory.png", "step-times.png", "throughput.png", "time.png"]


def test_the_report_of_a_folder_lies_in_it(make: Make, tmp_path: Path) -> None:
    make("all/a")
    make("all/b")
    page = report([str(tmp_path / "all")], None)
    assert page == tmp_path / "all" / "report" / "index.html"
    # And is no run the next time; it is made anew, without the plots that it has no more.
    (page.parent / "memory.png").write_bytes(b"old")
    (page.parent / "mine.txt").write_text("mine")
    assert report([str(tmp_path / "all")], None) == page
    assert not (page.parent / "memory.png").exists()
    assert (page.parent / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "index.html", "loss.png"])
def test_what_is_no_report_is_not_written_over(make: Make, tmp_path: Path, name: str) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / name).write_text("<html>mine</html>")
    with pytest.raises(MusterError) as error:
        report([str(make("run"))], taken)
    assert error.value.code == 2
    assert "--output" in error.value.fix
    assert [(path.name, path.read_text()) for path in taken.iterdir()] == [(name, "<html>mine</html>")]
    with pytest.raises(MusterError):
        report([str(make("other"))], taken / name)


def test_a_folder_that_cant_be_written_is_named(make: Make) -> None:
    with pytest.raises(MusterError) as error:
        report([str(make("run"))], Path("/proc/report"))
    assert "/proc/report" in error.value.seen


def test_wrong_input_is_three_lines_and_code_2(make: Make, tmp_path: Path) -> None:
    (make("bad") / "summary.json").write_text('{"model": ')
    for arguments in (["none"], ["bad"], ["bad", "none"], [], ["--outptu", "x", "bad"]):
        answer = muster(*arguments, cwd=tmp_path)
        assert answer.returncode == 2, arguments
        assert answer.stdout == ""
        wrong, seen, fix = answer.stderr.splitlines()
        assert wrong.startswith("error: ")
        assert seen.startswith(" seen: ")
        assert fix.startswith("  fix: ")


def test_names_are_no_markup_on_the_terminal(make: Make, tmp_path: Path) -> None:
    answer = muster(str(make("[red]x[", {"model": "[bold]m[/bold]"})), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "[red]x[" in answer.stdout
    assert "[bold]m[/bold]" in answer.stdout


def test_a_name_that_is_no_text_is_printed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make("run").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    main()
    assert (folder / "report" / "index.html").is_file()
    assert "caf\\udce9/report/index.html" in capfd.readouterr().out


def test_many_runs_with_long_names_stay_within_the_width(make: Make, tmp_path: Path) -> None:
    for index in range(7):
        make(f"all/{'long-name-' * 8}{index}", {"world_size": index + 1})
    answer = muster("all", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert max(map(len, answer.stdout.splitlines()[:-2])) <= 80
    assert answer.stdout.count("training loss") == 3


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, report.__main__; print([m for m in ('torch', 'numpy', 'matplotlib', 'rich') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(answer.stdout.replace("'", '"')) == []
