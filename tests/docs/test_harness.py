"""The rules by which pages are read, run and compared: faults in a page have to be found."""

from pathlib import Path

import pytest

from tests.docs import pages, running
from tests.docs.pages import PageError
from tests.docs.shown import missing


def page(folder: Path, text: str) -> pages.Page:
    path = folder / "page.md"
    path.write_text(text)
    return pages.read(path)


def wrong(folder: Path, text: str, kind: str = "") -> list[str]:
    """The faults of a page with this text."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return running.check(page(folder, text), work, kind)


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


REAL = "muster: local: 1 node x 2 = 2 ranks\n\nworld   2 processes on box (ddp, gloo)\ntime of a step  809.3 ms\nend\n"


@pytest.mark.parametrize(
    "shown",
    [
        ["muster: local: 1 node x 8 = 8 ranks", "world 8 processes on box (ddp, gloo)", "time of a step 1.2 s", "end"],
        ["...", "time of a step  3 ms", "..."],
        ["muster: ...", "...", "end"],
        ["...", "end", "..."],
        ["..."],
    ],
)
def test_output_that_differs_in_figures_only_is_the_same(shown: list[str]) -> None:
    assert missing(shown, REAL) is None


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (["...", "word of a step 3 ms", "..."], "not in the output: word of a step"),
        (["...", "time of a step 3 GiB", "..."], "not in the output: time of a step"),
        (["end"], "lines between them"),
        (["...", "end", "world 2 processes on box (ddp, gloo)", "..."], "another order"),
        (["...", "world 2 processes on box (fsdp, ...)", "..."], "not in the output"),
    ],
)
def test_a_line_that_is_not_there_is_named(shown: list[str], said: str) -> None:
    assert said in str(missing(shown, REAL))


def test_paths_and_this_host_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7b")
    assert missing(["laptop wrote /home/me/runs/a"], "node-7b wrote /tmp/x9/b\n") is None
    assert missing(["laptop wrote runs/a"], "node-7b wrote runs/b\n") is not None
    assert missing(["laptop wrote"], "another-7b wrote\n") is not None


def test_commands_run_in_order_in_one_shell_and_one_folder(tmp_path: Path) -> None:
    text = console("$ export WORD=hello", "$ cat > file <<'EOF'", "a $WORD", "EOF", "$ cat file", "a $WORD")
    text += "```bash\n# comment\nfor i in 1 2; do\n  echo $i >> file\ndone\n```\n"
    assert wrong(tmp_path, text + console("$ tail -n 2 file; echo $WORD", "1", "2", "hello")) == []
    assert not list((tmp_path / "work").glob(".commands*"))


def test_a_wrong_line_fails_with_what_was_written(tmp_path: Path) -> None:
    (said,) = wrong(tmp_path, console("$ echo right", "right", "$ echo this; echo that", "this", "other"))
    assert "page.md, line 4: $ echo this; echo that" in said
    assert "not in the output: other" in said
    assert "| that" in said


def test_exit_codes(tmp_path: Path) -> None:
    assert wrong(tmp_path, console("$ (exit 3)", "$ echo $?", "3")) == []
    assert "ended with 3, and not with 2" in wrong(tmp_path, console("$ (exit 3)", "$ echo $?", "2"))[0]
    assert "ended with 1, and not with 0" in wrong(tmp_path, "```bash\nfalse\n```\n")[0]
    (said,) = wrong(tmp_path, console("$ exit 0", "$ true"))
    assert "did not end" in said


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo before; sleep 300")
    assert running.locally(script, tmp_path, timeout_s=0.5).startswith("before\n\n(ended after")


def test_a_command_with_a_syntax_error_is_no_harm_to_the_next(tmp_path: Path) -> None:
    (said,) = wrong(tmp_path, console("$ echo )", "$ echo b", "b"))
    assert "syntax error" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- test: clusters -->\n```bash\ntrue\n```\n", "no mark 'clusters'"),
        ("<!-- test: none -->\n```bash\ntrue\n```\n", "has a reason"),
        ("<!-- test: slurm: why -->\n```bash\ntrue\n```\n", "others have none"),
        ("<!-- test: dry -->\ntext\n", "before no block"),
        ("```bash\ntrue\n", "does not end"),
        (console("output"), "output without a command"),
        (console("$ echo 'a"), "command does not end"),
    ],
)
def test_a_page_that_can_not_be_read(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        wrong(tmp_path, text)


def test_other_blocks_and_marked_ones_do_not_run(tmp_path: Path) -> None:
    text = "<!-- test: none: there is no docker -->\n```bash\nfalse\n```\n```python\n1 / 0\n```\n<!-- a comment -->\n\n"
    assert wrong(tmp_path, text) == []
    assert len(page(tmp_path, text).commands("none")) == 1


def test_files_are_written_or_held_against_the_repository(tmp_path: Path) -> None:
    mine = "<!-- file: sub/mine.py -->\n```python\nprint(7)\n```\n"
    assert wrong(tmp_path, mine + console("$ python sub/mine.py", "7")) == []
    theirs = "<!-- file: examples/print_hostinfo.py -->\n```python\n{}\n```\n"
    assert wrong(tmp_path, theirs.format("import os\nimport socket")) == []
    with pytest.raises(PageError, match="does not have"):
        wrong(tmp_path, theirs.format("import torch"))


def test_dry_blocks_plan_what_they_launch(tmp_path: Path) -> None:
    def dry(text: str) -> list[str]:
        return wrong(tmp_path, f"<!-- test: dry -->\n```bash\n{text}\n```\n", "dry")

    assert dry("srun -N 2 apptainer exec --nv muster.sif \\\n  train ddp --epochs 1  # a comment") == []
    assert "bash -n" in dry("srun (")[0]
    assert "--dry-run --epoch 1" in dry("srun train ddp --epoch 1")[0]
    with pytest.raises(PageError, match="can't be planned"):
        dry("srun train selftest --ranks 2")
