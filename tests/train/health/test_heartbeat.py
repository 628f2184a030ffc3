"""A rank that is dead, stopped or hangs is named, and ends all ranks; a job that is suspended as a whole goes on."""

import json
import pickle
import re

import pytest
import torch.distributed as dist

from muster.train.distributed.world import CHECKPOINT, COMPUTING, CONNECTING, DATA, LEFT, RankStatus, World
from muster.train.health import heartbeat
from muster.train.health.heartbeat import Beat, Heartbeat, Monitor, describe_ranks, num_collectives

DEADLINE_S = 120

LIGHT = ["--model=squeezenet1_1", "--image-size=32"]
"""A model whose step stays well below a second on a busy machine, for tests in which a step of seconds is a hang."""

FAST = """
from muster.train.health import heartbeat
heartbeat.BEAT_S, heartbeat.GONE_S, heartbeat.DUMP_S = 0.5, 7.5, 10.0
"""
"""A store counts as gone after 17.5 s (GONE_S + DUMP_S) instead of 60, and a beat comes every 0.5 s instead of 3."""

PLANTED = """
import os, signal, time
from pathlib import Path
from muster.train.trainer import Trainer
{fast}
folder, deed = Path("{folder}"), "{deed}"
(folder / ("pid" + os.environ["RANK"])).write_text(str(os.getpid()))

def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

def suspend(pids):
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(9 if number == signal.SIGSTOP else 0)
    (folder / "suspended").touch()

def do():
    own = os.getpid()
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    if deed == "kill":
        os.kill(own, signal.SIGKILL)
    elif not os.fork():
        if deed == "suspend":
            suspend(pids)
        elif deed == "pause":
            suspend([own])
        else:
            while any(is_alive(pid) for pid in pids if pid != own):
                time.sleep(0.1)
            os.kill(own, signal.SIGKILL)
        os._exit(0)
    elif deed == "stop":
        os.kill(own, signal.SIGSTOP)

step = Trainer.train_step
def planted(self, batches, sums):
    if self.progress.step == 5 and os.environ["RANK"] == "{rank}":
        do()
    step(self, batches, sums)
Trainer.train_step = planted
"""

STUCK = """
import os, time
{fast}
def quite_stuck():
    time.sleep(1000)
from muster.train.data.loader import Reader
read = Reader.__getitems__
calls = [0]
def broken(self, draws):
    calls[0] += 1
    if calls[0] == 3 and os.environ.get("RANK", "0") == "{rank}":
        quite_stuck()
    return read(self, draws)
Reader.__getitems__ = broken
"""


def beat(number, ticks=0, *, phase=COMPUTING, is_patient=False, lost_peer=False):
    return Beat(number, ticks, 0, phase, is_patient, lost_peer, False, "here")


def heard(*turns):
    monitor = Monitor()
    for turn in turns:
        monitor.update(dict(enumerate(turn)))
    return monitor


def test_a_beat_is_read_as_it_was_written():
    told = beat(3, 7, phase="set-up")
    assert Beat.read(json.dumps(told).encode()) == told
    assert Beat.read(b"") is None


def test_a_rank_that_has_not_come_is_not_dead():
    monitor = heard(*([(beat(number), None) for number in range(9)]))
    assert monitor.dead(3) == []
    assert not monitor.is_hung(99)


def test_the_dead_are_those_whose_beat_stays_the_same():
    turns = [(beat(number), beat(min(number, 2)), beat(min(number, 3))) for number in range(6)]
    assert heard(*turns[:5]).dead(3) == []
    assert heard(*turns).dead(3) == [1, 2]  # a host's ranks did not all beat at the same moment
    assert heard(*turns).dead(4) == []


def test_a_rank_that_has_left_is_neither_dead_nor_hung():
    monitor = heard(*[(beat(number, number), beat(0, phase=LEFT)) for number in range(9)])
    assert monitor.dead(3) == []
    assert not monitor.is_hung(3)


def test_a_turn_missed_by_the_listener_counts_for_nobody():
    monitor = heard((beat(1), beat(1)), (beat(1), beat(1)), (beat(2), beat(2)), (beat(2), beat(2)))
    assert monitor.dead(2) == []


@pytest.mark.parametrize(("patient", "turns", "expected"), [(False, 5, True), (True, 5, False), (True, 21, True)])
def test_a_rank_stands_still_when_its_ticks_do(patient, turns, expected):
    monitor = heard(*[(beat(number, 3, is_patient=patient), beat(number, 3)) for number in range(turns)])
    assert monitor.is_hung(4) is expected
    assert not heard(*[(beat(number, number),) for number in range(99)]).is_hung(4)


def test_a_rank_that_has_lost_another_does_not_hang():
    assert not heard(*[(beat(number, 3, lost_peer=True), beat(0, phase=LEFT)) for number in range(9)]).is_hung(4)


def test_the_lagging_rank_has_the_fewest_ticks_and_then_the_fewest_collectives():
    assert heard((beat(1, 6), beat(1, 5), beat(1, 6))).lagging({}) == [1]
    same = heard((beat(1, 6), beat(1, 6), beat(1, 6)))
    assert same.lagging({0: [9, 0, 7], 1: [9, 0, 7], 2: [8, 0, 7]}) == [2]
    assert same.lagging({0: [9, 0, 7], 2: [8, 0, 7]}) == [0, 1, 2]
    # A kernel hangs: all processes have enqueued equally many collectives.
    assert same.lagging({0: [9, 8, 7], 1: [9, 7, 7], 2: [9, 8, 7]}) == [1]
    assert same.lagging({0: [9, 0, 6], 1: [9, 0, 7], 2: [9, 0, 7]}) == [0]


def test_collectives_are_counted_over_all_groups():
    groups = {
        "0": {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 7},
        "1": {"last_enqueued_collective": 3, "last_started_collective": -1, "last_completed_collective": 3},
    }
    assert num_collectives(pickle.dumps({"pg_status": groups})) == [12, 0, 10]
    assert num_collectives(pickle.dumps({"entries": []})) is None
    assert num_collectives(b"") is None


@pytest.mark.parametrize("compiles", [False, True])
def test_patience_is_for_files_and_compilers_and_not_for_who_waits_for_others(compiles):
    status = RankStatus(compiles=compiles)
    assert status.is_patient  # at set-up
    with status.connecting():
        assert status.is_patient is compiles
        ticks = status.ticks
    assert (status.is_patient, status.ticks) == (True, ticks + 1)
    status.enter(COMPUTING)
    assert status.is_patient is compiles  # in the first step
    status.stepped(1)
    assert not status.is_patient
    status.enter(CHECKPOINT)
    assert status.is_patient


def test_ranks_are_named_in_few_words():
    beats = {rank: beat(1)._replace(host=f"node{rank // 8}") for rank in range(100)}
    assert describe_ranks([3], beats) == "rank 3 on node0"
    assert describe_ranks(list(range(8, 16)), beats) == "ranks 8, 9, 10, 11, 12, 13, 14, 15 on node1"
    assert describe_ranks([1, 9], beats) == "ranks 1, 9 on node0, node1"
    assert len(describe_ranks(list(range(0, 100, 2)), beats)) < 80


def test_rank_0_keeps_beating_while_it_waits_for_the_stacks_of_others(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "DUMP_S", 0.2)
    monkeypatch.setattr(Heartbeat, "_exchange", lambda self: None)
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)
    monkeypatch.setattr(Heartbeat, "_dump", lambda self: {"written": True})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("hang-dump/0", "")
    store.set("hang-dump/1", "")
    rank_0 = Heartbeat(World(world_size=2, store=store), 1, 1)
    rank_0.monitor = heard((beat(1), beat(1)))
    assert rank_0._answers() == {0: {"written": True}, 1: {}}
    assert Beat.read(store.get("heartbeat/0")).number > 3


def errors(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


def planted(folder, rank, deed, fast=FAST):
    """Code by which `rank`, in its sixth step, does `deed`."""
    return PLANTED.format(fast=fast, folder=str(folder), rank=rank, deed=deed)


@pytest.mark.process
@pytest.mark.parametrize("deed", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_a_rank_that_is_killed_or_stopped_is_named(train, small, tmp_path, deed):
    argv = ["ddp", *small, "--silence-timeout=10", f"--runs-dir={tmp_path / 'runs'}"]
    ended = train(argv, 3, before=planted(tmp_path, 1, deed))
    assert [rank.code for rank in ended] == [1, -9, 1]
    [line] = errors(ended[0].err + ended[2].err)
    assert "rank 1 on" in line
    assert "no sign of life" in line
    assert re.search(r"last heard of in step \d", ended[0].err)
    assert "the scheduler's accounting" in ended[0].err
    assert "the same command starts it again" in ended[0].err  # there is no checkpoint yet
    assert "Traceback" not in ended[0].err + ended[2].err
    assert not ended[2].err or "rank 1 on" in ended[2].err


@pytest.mark.process
@pytest.mark.parametrize("deed", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_without_rank_0_and_its_store_all_end(train, small, tmp_path, deed):
    ended = train(["ddp", *small, f"--runs-dir={tmp_path / 'runs'}"], 3, before=planted(tmp_path, 0, deed))
    assert [rank.code for rank in ended] == [-9, 1, 1]
    for rank in ended[1:]:
        assert "the store at 127.0.0.1:" in rank.err
        assert "Traceback" not in rank.err


@pytest.mark.full
@pytest.mark.once
@pytest.mark.process
def test_a_job_that_is_suspended_as_a_whole_goes_on(train, small, tmp_path):
    # Suspended for 9 s, twice as long as a rank may stand still.
    argv = ["ddp", *small, *LIGHT, "--max-steps=12", "--hang-timeout=4", f"--runs-dir={tmp_path / 'runs'}"]
    fast = "from muster.train import process\nfrom muster.train.health import heartbeat\n"
    fast += "heartbeat.BEAT_S, process.SILENT_S = 0.3, 4.5\n"
    train(argv, 3, before=planted(tmp_path, 2, "suspend", fast), ok=True)
    assert (tmp_path / "suspended").exists()


@pytest.mark.full
@pytest.mark.process
def test_a_rank_that_is_silent_for_a_minute_ends_nothing(train, small, tmp_path):
    # Like a rank that waits for a page of a file and holds Python's lock: 9 s are 18 beats, usually almost a minute.
    argv = ["ddp", *small, "--max-steps=12", f"--runs-dir={tmp_path / 'runs'}"]
    train(argv, 2, before=planted(tmp_path, 1, "pause"), ok=True)
    assert (tmp_path / "suspended").exists()


@pytest.mark.process
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_rank_that_stands_still_is_named_with_its_place_and_stacks(train, small, tmp_path, world_size):
    rank = world_size - 1
    strategy = "ddp" if world_size > 1 else "single"
    argv = [strategy, *small, *LIGHT, "--data=fake", "--num-samples=800", "--hang-timeout=3", "--name=run"]
    argv += [f"--runs-dir={tmp_path}", "--train-num-workers=0"]
    ended = train(argv, world_size, before=STUCK.format(fast=FAST, rank=rank))
    assert [process.code for process in ended] == [1] * world_size, ended[0].err
    [line] = errors("\n".join(process.err for process in ended))
    assert f"rank {rank} on" in line
    assert DATA in line
    assert "in step 3" in line
    [folder] = [path for path in (tmp_path / "run" / "logs" / "0").iterdir() if path.name != "flight"]
    stacks = [(folder / f"rank-{number}.stacks.txt").read_text() for number in range(world_size)]
    assert ["quite_stuck" in text for text in stacks] == [number == rank for number in range(world_size)]
    assert "quite_stuck" in ended[0].err
    assert "the same command starts it again" in ended[0].err


NEVER_CONNECTS = """
import os, time
{fast}
import torch.distributed as dist
start = dist.init_process_group
def never(*given, **options):
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    start(*given, **options)
dist.init_process_group = never
"""


@pytest.mark.process
def test_ranks_that_never_connect_are_told_as_a_hang(train, small, tmp_path):
    argv = ["ddp", *small, "--hang-timeout=3", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2, before=NEVER_CONNECTS.format(fast=FAST), deadline_s=60)
    assert [process.code for process in ended] == [1, 1], ended
    [line] = errors("\n".join(process.err for process in ended))
    assert CONNECTING in line


SLOW_STORE = """
import sys, time
from datetime import timedelta
from muster.train.health import heartbeat
send = heartbeat.Heartbeat._send

def slow(self):
    if self.stopped.is_set():
        try:
            self.store.wait(["never"], timedelta(seconds=5))
        except RuntimeError:
            pass
    return send(self)

heartbeat.Heartbeat._send = slow

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(6)  # the interpreter ends meanwhile

sys.modules["slow"] = Slow()
from muster.train.__main__ import main
main()
"""


@pytest.mark.full
@pytest.mark.process
def test_a_run_that_is_done_waits_for_its_last_word_to_the_store(ranks, small, tmp_path):
    # A thread that comes back from torch into an interpreter that has ended aborts the process.
    start, wait = ranks
    argv = ["ddp", *small, "--max-steps=2", "--train-num-workers=0", f"--runs-dir={tmp_path / 'runs'}"]
    ended = wait(start(argv, 2, tmp_path, program=("-c", SLOW_STORE)), tmp_path)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err + ended[1].err
