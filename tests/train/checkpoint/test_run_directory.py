import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint, run_directory
from muster.train.checkpoint.run_directory import Run, choose_run, default_name
from muster.train.distributed.world import World
from muster.train.reporting.summary import Log, write_file
from tests.train.comparing import STEPS, TEXT, save


def options(tmp_path, **more):
    return Options(runs_dir=str(tmp_path / "runs"), **more)


def with_checkpoint(folder, step=1):
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, {"model": "resnet18"}, step=step, keep=2)
    return folder


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("digits", "resnet18-digits-ddp"),
        ("imagefolder:/a b/c", "resnet18-imagefolder-c-ddp"),
        ("imagefolder:/data/my birds (2)/", "resnet18-imagefolder-my-birds-2-ddp"),
        ("imagefolder:..", "resnet18-imagefolder-ddp"),
        ("cifar10:/x/$HOME;ls", "resnet18-cifar10-HOME-ls-ddp"),
    ],
)
def test_default_names_are_safe(data, name):
    assert default_name(Options(data=data), "ddp") == name


def test_without_a_name_each_run_gets_its_own_folder(tmp_path):
    runs = [choose_run(options(tmp_path), "ddp").folder.name for _ in range(3)]
    assert runs == ["resnet18-digits-ddp", "resnet18-digits-ddp-2", "resnet18-digits-ddp-3"]
    assert choose_run(Options(runs_dir=str(tmp_path / "new" / "runs")), "ddp").folder.is_dir()


def test_an_explicit_name_is_never_overwritten(tmp_path):
    folder = choose_run(options(tmp_path, name="mine"), "ddp").folder
    # A run that ended before its first checkpoint gives its name back.
    (folder / "metrics.jsonl").touch()
    assert choose_run(options(tmp_path, name="mine"), "ddp").folder == folder
    with_checkpoint(folder)
    with pytest.raises(MusterError, match="never overwritten") as raised:
        choose_run(options(tmp_path, name="mine"), "ddp")
    assert str(folder) in raised.value.seen


def test_resume_takes_the_newest_that_has_a_checkpoint(tmp_path):
    first, second, _third = (choose_run(options(tmp_path), "ddp").folder for _ in range(3))
    with_checkpoint(second)
    assert choose_run(options(tmp_path, resume="auto"), "ddp").folder == second
    with_checkpoint(first)
    assert choose_run(options(tmp_path, resume="auto"), "ddp").folder == first
    chosen = choose_run(options(tmp_path, resume="auto", name="resnet18-digits-ddp-2"), "ddp")
    assert (chosen.folder, chosen.resumed_from) == (second, checkpoint.saved(second)[0])


@pytest.mark.parametrize("gone", ["", "index"], ids=["all of it", "its index"])
def test_a_last_checkpoint_that_is_gone_is_told(tmp_path, gone):
    folder = tmp_path / "runs" / "mine"
    for step in (1, 2):
        with_checkpoint(folder, step)
    before, last = sorted((folder / "checkpoints").glob("step-*"))
    (last / gone).unlink() if gone else shutil.rmtree(last)
    for resume in ("auto", str(folder)):
        chosen = choose_run(options(tmp_path, resume=resume, name="mine"), "ddp")
        assert chosen.candidates == [before]
        assert any(last.name in note for note in chosen.notes)


def test_resume_with_nothing_there_starts_and_says_so(tmp_path):
    # The job script of a run that is requeued always says --resume.
    for name in (None, "mine"):
        chosen = choose_run(options(tmp_path, resume="auto", name=name), "ddp")
        assert chosen.folder.is_dir()
        assert chosen.resumed_from is None
        assert "starts from the beginning" in chosen.notes[0]


def test_resume_a_folder_a_file_a_name(tmp_path):
    folder = with_checkpoint(tmp_path / "runs" / "old", step=4)
    with_checkpoint(folder, step=8)
    first = folder / "checkpoints" / "step-00000004"
    for given, path in [(str(folder), "8"), ("old", "8"), (str(folder / "checkpoints"), "8"), (str(first), "4")]:
        chosen = choose_run(options(tmp_path, resume=given), "ddp")
        assert chosen.folder.resolve() == folder
        assert chosen.resumed_from.name == f"step-0000000{path}"
    branch = choose_run(options(tmp_path, resume=str(first), name="branch"), "ddp")
    assert (branch.folder.name, branch.resumed_from) == ("branch", first)
    with_checkpoint(branch.folder)
    with pytest.raises(MusterError, match="never overwritten"):
        choose_run(options(tmp_path, resume=str(first), name="branch"), "ddp")
    for name in ("older", "n" * 300):  # the second name is too long for any file system
        with pytest.raises(MusterError, match="no run or checkpoint of this name"):
            choose_run(options(tmp_path, resume=name), "ddp")


def test_a_checkpoint_that_was_copied_or_linked_under_another_name_is_one(tmp_path):
    folder = with_checkpoint(tmp_path / "runs" / "old", step=4)
    first = folder / "checkpoints" / "step-00000004"
    shutil.copytree(first, tmp_path / "best")
    (tmp_path / "link").symlink_to(first)
    branch = choose_run(options(tmp_path, resume=str(tmp_path / "best"), name="branch"), "ddp")
    assert (branch.folder.name, branch.resumed_from) == ("branch", tmp_path / "best")
    chosen = choose_run(options(tmp_path, resume=str(tmp_path / "link")), "ddp")
    assert (chosen.folder.resolve(), chosen.resumed_from) == (folder, tmp_path / "link")


@pytest.mark.parametrize("name", ["step-100", "checkpoints"])
def test_a_run_may_be_called_as_a_checkpoint_or_their_folder_is(tmp_path, name):
    folder = with_checkpoint(tmp_path / "runs" / name, step=4)
    for given in (str(folder), name):
        chosen = choose_run(options(tmp_path, resume=given), "ddp")
        assert (chosen.folder, chosen.resumed_from.name) == (folder, "step-00000004")
        checkpoint.release()


def test_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(MusterError, match="can't be made"):
        choose_run(options(tmp_path), "ddp")


def test_a_disk_that_is_full_as_the_run_begins_is_told_with_the_folder(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the error of a failed write has no file name

    monkeypatch.setattr(run_directory, "write_text", full)
    with pytest.raises(MusterError, match="No space left") as raised:
        choose_run(options(tmp_path, name="mine"), "ddp", "launch")
    assert raised.value.seen == f"--runs-dir={tmp_path}/runs ({tmp_path}/runs/mine)"
    checkpoint.release()


def test_a_run_that_this_user_may_only_read_goes_on_under_another_name_as_the_error_says():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o777)
        old = with_checkpoint(Path(root, "colleague", "old"))
        for folder in (old, checkpoint.folder_of(old)):
            folder.chmod(0o555)
        if user == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            with pytest.raises(MusterError, match="Permission denied") as raised:
                choose_run(options(Path(root), resume=str(old)), "ddp")
            run = choose_run(options(Path(root), resume=str(old), name="NEW"), "ddp")
        finally:
            os.seteuid(user)
            checkpoint.release()
            old.chmod(0o755)
    assert raised.value.fix.startswith(f"--resume={old} --name=NEW goes on in another folder")
    assert (run.folder, run.resumed_from) == (Path(root, "runs", "NEW"), checkpoint.folder_of(old) / "step-00000001")


@pytest.mark.parametrize("kind", ["file", "link", "closed"])
@pytest.mark.parametrize("resume", ["auto", "latest", "mine", None])
def test_a_run_whose_checkpoints_can_not_be_read_does_not_begin_anew(kind, resume):
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o777)
        folder = checkpoint.folder_of(with_checkpoint(Path(root, "runs", "mine")))
        if kind == "closed":
            folder.chmod(0)
        else:
            folder.rename(folder.with_name("elsewhere"))
            folder.touch() if kind == "file" else folder.symlink_to("no such folder")
        if user == 0:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(MusterError) as raised:
                choose_run(options(Path(root), resume=resume, name="mine"), "ddp")
        finally:
            os.seteuid(user)
            checkpoint.release()
    assert raised.value.code == 2
    assert str(folder) in raised.value.seen


def test_auto_passes_over_runs_that_another_user_has_closed():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o777)
        base = choose_run(options(Path(root)), "ddp").folder
        checkpoint.release()
        with_checkpoint(base).chmod(0)
        Path(root, "runs").chmod(0o777)
        if user == 0:
            os.seteuid(65534)  # root may read everything
        try:
            run = choose_run(options(Path(root), resume="auto"), "ddp")
        finally:
            os.seteuid(user)
            checkpoint.release()
            base.chmod(0o700)
    assert run.folder.name == f"{base.name}-2"
    assert run.resumed_from is None


@pytest.mark.parametrize("resume", ["auto", "mine"])
def test_a_checkpoint_whose_successor_was_killed_is_the_newest(tmp_path, resume):
    folder = with_checkpoint(choose_run(options(tmp_path, name="mine"), "ddp").folder)
    (path,) = checkpoint.saved(folder)
    path.rename(path.with_name(f".{path.name}.old.partial"))
    name = "mine" if resume == "auto" else None
    assert choose_run(options(tmp_path, resume=resume, name=name), "ddp").resumed_from == path


WRITES = """
import sys, time
from muster.config import Options
from muster.train.checkpoint.run_directory import choose_run
choose_run(Options(runs_dir=sys.argv[1], name="mine"), "ddp", "their launch")
print("writes", flush=True)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("where", ["this host", "another host", "another of the same name"])
def test_a_run_that_another_process_writes_is_refused_until_that_is_gone(tmp_path, monkeypatch, where):
    runs = tmp_path / "runs"
    with subprocess.Popen([sys.executable, "-c", WRITES, str(runs)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "writes\n"
        monkeypatch.setattr(checkpoint, "SILENT_S", 8.0)
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 3600.0)  # the clock was set meanwhile
        with_checkpoint(runs / "mine")  # without another writer, the error would recommend --resume
        if where == "another host":
            monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        if where == "another of the same name":
            read = checkpoint.text_of
            monkeypatch.setattr(checkpoint, "text_of", lambda path: "2" if "boot_id" in str(path) else read(path))
            monkeypatch.setattr(checkpoint, "started", lambda pid: None if pid == other.pid else 1)
        for resume in (None, "auto"):
            with pytest.raises(MusterError, match="another training writes") as raised:
                choose_run(options(tmp_path, name="mine", resume=resume), "ddp")
            assert "in a copy of its folder, remove .writer" in raised.value.fix
        # Ranks that are started again by the same launch go on at once.
        other.kill()
    assert choose_run(options(tmp_path, name="mine"), "ddp", "their launch").folder == runs / "mine"
    checkpoint.release()
    assert not list((runs / "mine").glob(".writer"))


def test_a_run_whose_writer_ends_while_one_looks_is_free(tmp_path, monkeypatch):
    writer = tmp_path / ".writer"
    writer.write_text("{}")

    def end(path, own):
        path.unlink()
        return False

    monkeypatch.setattr(checkpoint, "is_alive", end)
    checkpoint.claim(tmp_path, "")
    assert writer.exists()
    checkpoint.release()


@pytest.mark.parametrize("before", [[], [1]], ids=["its first checkpoint", "another checkpoint"])
def test_what_a_writer_saves_that_ends_while_one_looks_is_resumed(tmp_path, monkeypatch, before):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    for step in before:
        with_checkpoint(folder, step)
    (folder / ".writer").write_text("{}")

    def end(path, own):
        with_checkpoint(folder, 2)
        path.unlink()
        return False

    monkeypatch.setattr(checkpoint, "is_alive", end)
    run = choose_run(options(tmp_path, name="mine", resume="auto"), "ddp")
    checkpoint.release()
    assert (run.folder, run.resumed_from.name) == (folder, "step-00000002")


@pytest.mark.parametrize("left", ["summary.json", "checkpoints/latest"])
@pytest.mark.parametrize("resume", ["auto", "latest", None])
def test_a_run_whose_checkpoints_are_gone_is_not_overwritten(tmp_path, resume, left):
    folder = with_checkpoint(tmp_path / "runs" / "mine")
    (folder / "summary.json").touch()
    for gone in ("checkpoints/step-00000001", *{"summary.json", "checkpoints"} - {left, left.partition("/")[0]}):
        shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
    with pytest.raises(MusterError, match="never overwritten") as raised:
        choose_run(options(tmp_path, name="mine", resume=resume), "ddp")
    assert str(folder) in raised.value.seen
    assert "--resume" not in raised.value.fix  # it would have nothing to resume


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_host_that_does_not_share_the_runs_folder_is_told(tmp_path, monkeypatch, is_shared):
    def gather(self, value):
        return [value, is_shared if isinstance(value, bool) else value]

    monkeypatch.setattr(World, "gather", gather)
    run = run_directory.share_run(World(world_size=2, hosts=("node01", "node02")), options(tmp_path), "ddp")
    checkpoint.release()
    assert [str(run.folder) in note and "node02" in note for note in run.notes] == ([] if is_shared else [True])


def test_a_host_where_the_runs_folder_may_not_be_seen_is_told_as_one_without(tmp_path, monkeypatch, request):
    run = tmp_path / "closed" / "mine"
    run.mkdir(parents=True)
    run.parent.chmod(0)
    request.getfixturevalue("as_other")

    def gather(self, value):
        return [["", str(run.relative_to(tmp_path))], value] if value is None else [True, value]

    monkeypatch.setattr(run_directory, "agree", lambda world, function: function())
    monkeypatch.setattr(World, "gather", gather)
    found = run_directory.share_run(World(rank=1, world_size=2, hosts=("node01", "node02")), options(tmp_path), "ddp")
    assert ["node02" in note for note in found.notes] == [True]


def test_of_two_that_find_the_same_dead_writer_one_alone_writes(tmp_path, monkeypatch):
    writer = tmp_path / ".writer"
    dead = msgspec.structs.replace(checkpoint.Writer.here("dead"), pid=2**30)
    writer.write_bytes(msgspec.json.encode(dead))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        quicker = msgspec.structs.replace(dead, pid=other.pid, started=checkpoint.started(other.pid), launch="other")
        looks = checkpoint.is_alive

        def look(path, own):
            is_theirs = looks(path, own)
            if not is_theirs:  # the other has looked too, and goes on first
                path.unlink()
                path.write_bytes(msgspec.json.encode(quicker))
            return is_theirs

        monkeypatch.setattr(checkpoint, "is_alive", look)
        with pytest.raises(MusterError, match="another training writes"):
            checkpoint.claim(tmp_path, "ours")
        assert msgspec.json.decode(writer.read_bytes(), type=checkpoint.Writer) == quicker
        other.communicate(b"\n")
    assert os.listdir(tmp_path) == [".writer"]


def test_a_run_whose_writer_on_another_host_is_silent_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SILENT_S", 1.0)
    theirs = msgspec.structs.replace(checkpoint.Writer.here("theirs"), host="elsewhere")
    (tmp_path / ".writer").write_bytes(msgspec.json.encode(theirs))
    checkpoint.claim(tmp_path, "ours")
    assert b'"ours"' in (tmp_path / ".writer").read_bytes()
    checkpoint.release()


def test_a_file_server_that_stands_still_as_one_looks_makes_no_writer_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SILENT_S", 3.0)
    theirs = msgspec.structs.replace(checkpoint.Writer.here("theirs"), host="elsewhere")
    (tmp_path / ".writer").write_bytes(msgspec.json.encode(theirs))
    looks, now, monotonic = [], [0.0], time.monotonic

    def touched(path):
        looks.append(path)
        if len(looks) == 2:
            now[0] += 300  # the server answers nobody meanwhile, so the other can't touch the file
        return len(looks) // 3

    monkeypatch.setattr(checkpoint, "touched", touched)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + now[0])
    with pytest.raises(MusterError, match="another training writes"):
        checkpoint.claim(tmp_path, "ours")


@pytest.mark.parametrize("content", [b"", b'{"host": "no', b'{"host": "\xff"'])
def test_a_run_whose_writers_file_is_damaged_is_free(tmp_path, monkeypatch, content):
    monkeypatch.setattr(checkpoint, "SILENT_S", 0.0)
    folder = with_checkpoint(tmp_path / "runs" / "mine")
    (folder / ".writer").write_bytes(content)
    assert choose_run(options(tmp_path, name="mine", resume="latest"), "ddp").folder == folder
    checkpoint.release()


def test_the_thread_that_touches_the_writers_file_is_a_daemon(tmp_path):
    before = set(threading.enumerate())
    checkpoint.claim(tmp_path, "")
    try:
        assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]
    finally:
        checkpoint.release()


@pytest.mark.parametrize("theirs", ["another's", None], ids=["writes", "has ended"])
def test_a_writer_that_another_took_for_dead_writes_no_more(tmp_path, monkeypatch, theirs):
    monkeypatch.setattr(checkpoint, "TOUCH_S", 0.02)
    folder = with_checkpoint(choose_run(options(tmp_path, name="mine"), "ddp").folder)
    before = checkpoint.saved(folder)
    writer, half = folder / ".writer", folder / "checkpoints" / ".step-00000002.partial" / "rank-00000"
    writer.unlink()
    half.parent.mkdir()
    half.write_text("another's")
    if theirs:
        writer.write_text(theirs)
    touched = checkpoint.touched(writer)
    try:
        for write in (
            lambda: with_checkpoint(folder, 2),
            lambda: Log(folder, 1),
            lambda: write_file(folder / "summary.json", "{}"),
        ):
            with pytest.raises(MusterError, match="another training has taken over") as raised:
                write()
            assert (theirs or "it is gone") in raised.value.seen
            assert raised.value.code == 1
        time.sleep(0.1)
    finally:
        checkpoint.release()
    assert checkpoint.touched(writer) == touched  # a training that lost its folder no longer touches the file
    assert checkpoint.saved(folder) == before
    assert half.read_text() == "another's"
    assert {path.name for path in folder.iterdir()} == {"checkpoints", *([".writer"] if theirs else [])}


def test_a_run_whose_folder_is_gone_is_told_so(tmp_path):
    folder = choose_run(options(tmp_path, name="mine"), "ddp").folder
    shutil.rmtree(folder)
    with pytest.raises(MusterError, match="could not be written: No such file"):
        Log(folder, 0)
    checkpoint.release()


# Another training takes this one for dead while it writes, and takes over.
TAKES_OVER = """
import shutil
from muster.train.checkpoint import manager, storage
def late(self, metadata, results, finish=storage.CheckpointWriter.finish):
    (self.folder.parents[1] / ".writer").write_text("another's")
    REMOVES and shutil.rmtree(self.folder)
    finish(self, metadata, results)
storage.CheckpointWriter.finish = late
"""


@pytest.mark.process
@pytest.mark.parametrize("removes", ["True", "False"], ids=["has saved", "has not saved yet"])
def test_a_checkpoint_that_comes_too_late_is_refused_once_on_all_ranks(train, tmp_path, removes):
    argv = ["ddp", *TEXT, *STEPS, "--max-steps=2", f"--runs-dir={tmp_path}", "--name=mine"]
    ranks = train(argv, 2, before=TAKES_OVER.replace("REMOVES", removes))
    assert [ended.code for ended in ranks] == [1, 1]
    assert "error: another training has taken over" in ranks[0].err
    assert "Traceback" not in ranks[0].err + ranks[1].err
    assert "error" not in ranks[1].err
    assert not checkpoint.saved(tmp_path / "mine")
    assert (tmp_path / "mine" / ".writer").read_text() == "another's"


@pytest.mark.parametrize(("name", "is_refused"), [("frist", True), ("first-2", False), ("another", False)])
def test_a_misspelt_name_is_not_resumed_from_the_beginning(tmp_path, name, is_refused):
    with_checkpoint(tmp_path / "runs" / "first-1")
    with_checkpoint(tmp_path / "runs" / "first")
    checkpoint.folder_of(with_checkpoint(tmp_path / "runs" / "unreadable")).rename(tmp_path / "checkpoints")
    checkpoint.folder_of(tmp_path / "runs" / "unreadable").touch()
    with pytest.raises(MusterError) if is_refused else nullcontext() as refused:
        choose_run(options(tmp_path, name=name, resume="latest"), "ddp")
    if is_refused:
        assert "--name first --resume" in refused.value.fix
    # The job script of a new run has --resume=auto.
    assert choose_run(options(tmp_path, name=name, resume="auto"), "ddp").resumed_from is None


def test_only_a_damaged_checkpoint_is_passed_over_and_the_last_one_is_not(tmp_path):
    def restore(candidates, identity):
        trained, manager = SimpleNamespace(model=None, fill=None), SimpleNamespace(group=None)
        run_directory.restore(trained, Run(tmp_path, candidates), identity, manager, World())

    newest, older = (checkpoint.folder_of(with_checkpoint(tmp_path, step)) / f"step-{step:08}" for step in (2, 1))
    candidates = [newest, older]
    with pytest.raises(MusterError, match="model"):
        restore(candidates, {"model": "another"})
    assert candidates == [newest, older]
    (newest / "index").unlink()
    with pytest.raises(MusterError) as raised:
        restore([newest], {})
    assert raised.value.seen == str(newest)
