"""A run stops ahead of its job's time limit; a warning ends a validation; a note reports too short a grace period."""

import json
import signal
import time
from types import SimpleNamespace

import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train.checkpoint import manager as checkpoint
from muster.train.checkpoint.manager import Progress, is_complete
from muster.train.health import preemption
from muster.train.health.preemption import SIGNALS, PreemptionNotice, TimeLimit, find, grace_period, ignored_until
from tests.train.checkpoint.test_resume import assert_same_bits, common, images  # noqa: F401
from tests.train.comparing import SPLITS, STEPS, TEXT, trained
from tests.train.health.test_preemption import steps_of

NOW = 1_800_000_000.0


@pytest.fixture
def at_now(monkeypatch):
    """Sets the clock of `preemption` to NOW."""
    monkeypatch.setattr(preemption, "time", SimpleNamespace(time=lambda: NOW))


def times(start, end, name="MUSTER"):
    """The variables of a job that began `start` minutes ago and ends in `end` minutes."""
    pairs = {"START": NOW - 60 * start, "END": NOW + 60 * end}
    name = "MUSTER_JOB" if name == "MUSTER" else name
    return {f"{name}_{which}_TIME": f"{seconds:.0f}" for which, seconds in pairs.items()}


@pytest.mark.parametrize("name", ["MUSTER", "MUSTER_SCHEDULER"])
def test_the_limit_is_known_by_the_schedulers_word_or_ours(name, at_now):
    deadline, notes = find(10, times(1, 59, name))
    assert deadline == TimeLimit(NOW + 59 * 60, 600)
    assert not notes


def test_what_the_user_sets_wins(at_now):
    assert find(10, times(1, 59, "MUSTER_SCHEDULER") | times(1, 30))[0] == TimeLimit(NOW + 30 * 60, 600)


@pytest.mark.parametrize(
    ("environ", "before_s"),
    [(times(1, 59), 300), (times(0, 20), 120), (times(1, 59, "MUSTER_SCHEDULER"), None), ({}, None)],
    ids=["5 minutes", "a tenth", "a script that may not requeue", "no limit"],
)
def test_the_default_is_for_jobs_that_come_again(environ, before_s, at_now):
    deadline, notes = find(None, environ)
    assert before_s == (deadline and deadline.before_s)
    assert not notes


@pytest.mark.parametrize("environ", [{}, {"MUSTER_SCHEDULER_END_TIME": "0"}, {"MUSTER_SCHEDULER_END_TIME": "N/A"}])
def test_without_a_limit_the_user_is_told_what_to_set(environ, at_now):
    deadline, notes = find(2.5, environ)
    assert deadline is None
    assert "--save-before=2.5" in notes[0]
    assert "export MUSTER_JOB_END_TIME=" in notes[0]


def test_save_before_0_turns_the_time_limit_off(at_now):
    assert find(0, times(1, 59)) == (None, [])


def test_more_minutes_than_the_job_has_are_refused(at_now):
    with pytest.raises(MusterError, match="no time to train") as refusal:
        find(60, times(1, 59, "MUSTER_SCHEDULER"))
    assert refusal.value.code == 2
    assert "60 minutes" in refusal.value.seen


def test_a_late_start_is_told_of_and_does_not_fail(at_now):
    """Nodes came late, or it is the second training in a job: less time is left than --save-before is to leave."""
    deadline, notes = find(10, times(55, 5, "MUSTER_SCHEDULER"))
    assert deadline is not None
    assert deadline.is_near()
    assert "5.0 minutes" in notes[0]


def test_an_end_in_the_past_is_ignored(at_now):
    deadline, notes = find(10, times(90, -30))
    assert deadline is None
    assert "is ignored" in notes[0]


@pytest.mark.parametrize("text", ["tomorrow", "-5", "1e9", "$(date)"])
@pytest.mark.parametrize("name", ["MUSTER_JOB_END_TIME", "MUSTER_JOB_START_TIME"])
def test_a_value_that_is_no_time_is_refused(name, text):
    with pytest.raises(MusterError, match=f"{name} is not a time") as refusal:
        find(10, times(1, 59) | {name: text})
    assert refusal.value.code == 2
    assert refusal.value.fix.startswith(f"export {name}=$(date ")


def test_a_notice_reads_the_clock_when_it_is_asked(monkeypatch):
    now = [NOW]
    monkeypatch.setattr(preemption, "time", SimpleNamespace(time=lambda: now[0]))
    notice = PreemptionNotice(TimeLimit(NOW + 600, 60))
    assert not notice.reason
    now[0] += 541
    assert "--save-before=1" in notice.reason
    said = notice.reason
    now[0] -= 100  # a clock that is set back does not withdraw the notice
    assert notice.reason == said


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"MUSTER_SCHEDULER": "slurm"}, 30),
        ({"MUSTER_SCHEDULER": "flux"}, 5),
        ({"MUSTER_SCHEDULER": "pbs"}, 10),
        ({"MUSTER_SCHEDULER": "lsf"}, 10),
        ({"MUSTER_SCHEDULER": "grid_engine"}, 60),
        ({"MUSTER_SCHEDULER": "kubernetes"}, 30),
        ({"MUSTER_SCHEDULER": "slurm", "MUSTER_GRACE_S": "300"}, 300),
        ({"MUSTER_GRACE_S": "20"}, 20),
    ],
)
def test_the_grace_is_the_scripts_or_the_schedulers(environ, seconds):
    found = grace_period(environ, None)
    assert found.seconds == seconds
    assert found.note(seconds - 1, 1) is None
    note = found.note(seconds, 1)
    assert note is not None
    assert "--save-before=" in note


def test_the_grace_that_is_asked_for_counts():
    found = grace_period({"MUSTER_SCHEDULER": "pbs"}, TimeLimit(NOW, 600))
    assert found.note(500, 1) is None
    assert grace_period({}, None).note(1e6, 1) is None
    with pytest.raises(MusterError, match="MUSTER_GRACE_S") as refusal:
        grace_period({"MUSTER_GRACE_S": "soon"}, None)
    assert refusal.value.fix == "export MUSTER_GRACE_S=300"


SHORT = times(0, 5) | {"MUSTER_GRACE_S": "300"}


def test_a_job_that_is_warned_at_its_start_stops_by_the_clock(at_now):
    deadline, notes = find(None, SHORT)
    assert deadline == TimeLimit(NOW + 300, 30)
    assert "--save-before=0.5" in notes[0]
    assert grace_period(SHORT, deadline).seconds == 30


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        (SHORT, 60),
        (times(0, 6) | {"MUSTER_GRACE_S": "300"}, 60),
        (times(0, 60) | {"MUSTER_GRACE_S": "300"}, None),
        (times(0, 1) | {"MUSTER_GRACE_S": "20"}, None),
        (times(0, 5), None),
        ({"MUSTER_GRACE_S": "300"}, None),
    ],
)
def test_only_a_warning_longer_than_the_job_is_ignored_and_only_in_its_first_minute(environ, seconds):
    assert ignored_until(environ) == (NOW + seconds if seconds else 0)


@pytest.mark.parametrize(("until_s", "is_heard"), [(60, False), (-1, True)])
def test_term_is_always_heard(until_s, is_heard):
    notice = PreemptionNotice(ignored_until=time.time() + until_s)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        notice.listen()
        signal.raise_signal(signal.SIGUSR1)
        assert (notice.reason == "SIGUSR1") == is_heard
        signal.raise_signal(signal.SIGTERM)
        assert notice.reason == ("SIGUSR1" if is_heard else "SIGTERM")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_the_note_says_what_to_type():
    found = grace_period({"MUSTER_SCHEDULER": "slurm"}, None)
    assert found.note(1, 1) is None
    note = found.note(80, 2)
    assert "--save-before=3" in note
    assert "30 s after a warning the job is killed (slurm's default)" in note


def test_a_run_is_complete_when_its_last_step_is_validated():
    options = Options(max_steps=6)
    record = {"epoch": 1, "step": 6}
    assert is_complete(Progress(step=6, history=[record]), options)
    assert not is_complete(Progress(step=6, history=[record | {"step": 4}]), options)
    assert not is_complete(Progress(step=6), options)
    assert is_complete(Progress(step=7), options)


@pytest.fixture(scope="module")
def argv(common):  # noqa: F811
    return ["ddp", *common, "--epochs=2", "--name=run"]


@pytest.fixture(scope="module")
def straight(train, argv, tmp_path_factory):
    runs = tmp_path_factory.mktemp("straight")
    train([*argv, f"--runs-dir={runs}"], 2, ok=True)
    return runs / "run"


CLOCK = """
import os
from types import SimpleNamespace
from muster.train import trainer
from muster.train.health import preemption
trainer.SYNC_STEPS = 1
step, steps = trainer.Trainer.train_step, [0]
def counted(self, batches, sums):
    step(self, batches, sums)
    steps[0] = self.progress.step
trainer.Trainer.train_step = counted
# The other rank's clock is far ahead, and counts for nothing.
ahead = 1e6 if os.environ["RANK"] == "1" else 0
preemption.time = SimpleNamespace(time=lambda: 1.8e9 + 60 * steps[0] + ahead)
"""


@pytest.mark.process
def test_all_ranks_stop_ahead_of_the_limit_and_lose_nothing(train, argv, straight, tmp_path):
    """The clock advances by a minute a step, on fast machines and slow ones."""
    argv = [*argv, f"--runs-dir={tmp_path}"]
    job = {"MUSTER_SCHEDULER_START_TIME": "1799999000", "MUSTER_SCHEDULER_END_TIME": "1800000600"}
    ended = train([*argv, "--save-before=5"], 2, before=CLOCK, env=job)
    assert [rank.code for rank in ended] == [75, 75]
    assert steps_of(tmp_path / "run") == 6
    assert "minutes to the job's time limit, --save-before=5" in ended[0].err
    assert not ended[1].err
    train([*argv, "--resume"], 2, ok=True)
    assert_same_bits(straight, tmp_path / "run")


@pytest.mark.process
def test_the_real_clock_and_the_measured_save(train, argv, tmp_path):
    argv = [word.replace("--epochs=2", "--epochs=9999") for word in argv]
    end = time.time() + 10 * 60
    job = {"MUSTER_JOB_END_TIME": f"{end:.0f}", "MUSTER_SCHEDULER": "slurm", "MUSTER_GRACE_S": "0"}
    # 9.99 of 10 minutes: the run has to stop as soon as it has begun, or a little later.
    argv = [*argv, f"--runs-dir={tmp_path}"]
    (ended, _) = train([*argv, "--save-before=9.99"], 2, env=job)
    assert ended.code == 75
    assert time.time() < end
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    saves = [line for line in lines if line["kind"] == "checkpoint"]
    assert saves[-1]["step"] == steps_of(tmp_path / "run")
    assert all(line["save_s"] > 0 for line in saves)
    # One more epoch, which ends with a checkpoint: the note reports its time.
    further = f"--max-steps={saves[-1]['step'] + 4}"
    again = train([*argv, "--resume", "--save-before=0", further], 2, env=job, ok=True)
    assert again[0].out.count("note: a checkpoint took") == 1
    assert "--save-before=1" in again[0].out
    assert "note:" not in again[1].out


@pytest.mark.process
def test_no_time_to_train_is_told_by_one(train, argv, tmp_path):
    job = {
        "MUSTER_SCHEDULER_START_TIME": f"{time.time() - 60:.0f}",
        "MUSTER_SCHEDULER_END_TIME": f"{time.time() + 240:.0f}",
    }
    ended = train([*argv, f"--runs-dir={tmp_path}", "--save-before=5"], 2, env=job)
    assert [rank.code for rank in ended] == [2, 2]
    assert "5 minutes" in ended[0].err
    assert not ended[1].err
    assert not list(tmp_path.iterdir())


WARN = """
import os, signal
from muster.train import trainer

trainer.SYNC_STEPS = 1
out = os.fdopen(os.dup(1), "w", buffering=1)
validate = trainer.Trainer.evaluate
def warned(self):
    evaluate, batches = self.gradients.evaluate, [0]
    def counted(*arguments):
        batches[0] += 1
        if self.progress.step == {step} and batches[0] == 1 and os.environ.get("RANK", "0") == "{rank}":
            os.kill(os.getpid(), signal.SIGUSR1)
        print("batch", self.progress.step, batches[0], file=out)
        return evaluate(*arguments)
    self.gradients.evaluate = counted
    try:
        return validate(self)
    finally:
        del self.gradients.evaluate
trainer.Trainer.evaluate = warned
"""


# Three steps an epoch, and three batches of each rank to validate on.
THREE = ["--data=fake", "--num-samples=240", "--num-classes=3", "--batch-size=4", "--accumulate=9", "--image-size=32"]
THREE += ["--model=mobilenet_v3_small", "--no-bf16", "--warmup-steps=0", "--lr=0.02", "--epochs=2", "--name=run"]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.process
@pytest.mark.parametrize(("more", "step"), [([], 3), (["--max-steps=4"], 4)], ids=["of an epoch", "of the last step"])
def test_a_warning_ends_a_validation_which_is_done_again(train, tmp_path, more, step):
    argv = ["ddp", *THREE, *more]
    train([*argv, f"--runs-dir={tmp_path / 'straight'}"], 2, ok=True)
    straight = tmp_path / "straight" / "run"
    ended = train([*argv, f"--runs-dir={tmp_path}"], 2, before=WARN.format(step=step, rank=1))
    assert [rank.code for rank in ended] == [75, 75]
    assert f"after step {step}" in ended[0].err
    state = checkpoint.load_newest(tmp_path / "run")[1]
    assert state["progress"]["step"] == step
    assert all(record["step"] < step for record in state["progress"]["history"])
    # Both ranks have broken off, after the same batch.
    batches = [rank.out.split(f"batch {step} ")[1:] for rank in ended]
    assert len(batches[0]) == len(batches[1]) == 2
    train([*argv, f"--runs-dir={tmp_path}", "--resume"], 2, ok=True)
    assert_same_bits(straight, tmp_path / "run")
    one, other = (json.loads((run / "summary.json").read_text()) for run in (straight, tmp_path / "run"))
    for name in ("step", "best_accuracy", "final_accuracy", "final_valid_loss", "final_train_loss"):
        assert one[name] == other[name], name


@pytest.mark.once
@pytest.mark.process
@pytest.mark.parametrize(
    "strategy", [pytest.param("fsdp", marks=pytest.mark.full), pytest.param("tp", marks=pytest.mark.full), "pipeline"]
)
def test_ranks_that_validate_together_break_off_together(train, tmp_path, strategy):
    world_size, split = SPLITS[strategy]
    options = [*TEXT, *split, *STEPS, "--max-steps=3"]
    whole = trained(train, tmp_path, strategy, world_size, options, "whole")
    argv = [strategy, *options, "--name=warned", f"--runs-dir={tmp_path}"]
    ended = train(argv, world_size, before=WARN.format(step=3, rank=world_size - 1))
    assert [process.code for process in ended] == [75] * world_size
    train([*argv, "--resume"], world_size, ok=True)
    again = checkpoint.load_newest(tmp_path / "warned")[1]
    assert all(tensor.equal(again["model"][name]) for name, tensor in whole["model"].items())
    records = [{**state["progress"]["history"][-1], "seconds": 0} for state in (whole, again)]
    assert records[0] == records[1]
