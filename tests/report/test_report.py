"""`muster report`, as its users start it: what it prints, writes and refuses."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from muster.errors import MusterError
from muster.report.__main__ import main, report
from tests.report.conftest import Make

ROOT = Path(__file__).resolve().parents[2]


def muster(*arguments: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs `muster report` with `arguments`, in the folder `cwd`."""
    code = (
        f"import sys; sys.argv = {['muster', 'report', *arguments]!r}; from muster.entrypoint import cli; cli.muster()"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(cwd), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_tables_and_page_of_recorded_runs(recordings: Path, tmp_path: Path) -> None:
    answer = muster(*(str(recordings / "scale" / name) for name in ("w1", "w2", "w4")), cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert max(map(len, answer.stdout.splitlines())) <= 80
    for said in (
        "Weak scaling: resnet18 on digits, ddp",
        "efficiency",
        "Efficiency = rate(W) / (W/W0 x rate(W0))",
    ):
        assert said in answer.stdout
    # The report on several runs is in the current folder, and the last line names it.
    assert answer.stdout.splitlines()[-1].endswith("report/index.html")
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["index.html"]


def test_a_terminal_without_unicode_has_a_report(make: Make, tmp_path: Path) -> None:
    answer = muster(str(make("größe")), "--output", "straße", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "page     stra\\xdfe/index.html"


def test_the_report_of_a_folder_lies_in_it(make: Make, tmp_path: Path) -> None:
    make("all/a")
    make("all/b")
    page = report([str(tmp_path / "all")], None)
    assert page == tmp_path / "all" / "report" / "index.html"
    # The next report does not take it for a run, and replaces the page.
    (page.parent / "mine.txt").write_text("mine")
    assert report([str(tmp_path / "all")], None) == page
    assert (page.parent / "mine.txt").read_text() == "mine"


def test_the_report_of_a_folder_with_one_run_lies_in_it_too(make: Make, tmp_path: Path) -> None:
    run = make("all/a")
    assert report([str(tmp_path / "all")], None) == tmp_path / "all" / "report" / "index.html"
    for given in (run, run / "summary.json"):
        assert report([str(given)], None) == run / "report" / "index.html"


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


def test_the_empty_page_that_a_full_disk_left_is_written_over(make: Make, tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    assert "<html" in report([str(make("run"))], tmp_path).read_text()


def test_the_page_of_all_runs_is_not_taken_for_a_run(make: Make, tmp_path: Path) -> None:
    """`muster report runs`, then `muster report runs/*`."""
    for name in ("a", "b"):
        make(f"runs/{name}")
    report([str(tmp_path / "runs")], None)
    answer = muster(*sorted(os.path.relpath(path, tmp_path) for path in (tmp_path / "runs").iterdir()), cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert muster("runs/report", cwd=tmp_path).returncode == 2


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


def test_a_reader_that_closes_the_pipe_gets_no_traceback(make: Make) -> None:
    """As `muster report RUN | head` does after the tables."""
    close = "reads, writes = os.pipe(); os.close(reads); os.dup2(writes, 1)"
    code = (
        f"import os, sys; from muster.report import __main__ as command; {close}; "
        f"command.tables.show = lambda *all: None; sys.argv[1:] = [{str(make('run'))!r}]; command.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (1, "")


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
    assert max(map(len, answer.stdout.splitlines()[:-1])) <= 80
    assert answer.stdout.count("│ training loss           │") == 3


def test_a_narrow_terminal_has_all_digits(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report([str(recordings / "scale")], tmp_path / "out")
    runs, _, scaling = capsys.readouterr().out.partition("Weak scaling: resnet18")
    for value in ("resnet18", "111.6", "93.87%", "119", "1 min 30 s", "done"):
        assert f" {value} " in runs
    assert scaling
    assert "…" not in runs + scaling


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    heavy = ("torch", "numpy", "matplotlib", "rich", "jinja2")
    code = f"import json, sys, muster.report.__main__; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert json.loads(answer.stdout) == []


def test_the_wheel_has_the_template() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    others = {path.name for path in (ROOT / "muster" / "report").glob("*.*") if path.suffix != ".py"}
    assert set(packaged["muster.report"]) == others == {"page.html"}
