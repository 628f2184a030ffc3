"""The commands as processes: their output, their exit codes, and the processes that they start."""

import errno
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args  # pyright: ignore[reportUnknownVariableType]

from muster.config import STRATEGIES
from muster.entrypoint import cli
from muster.entrypoint.options import LaunchOptions
from tests.clusters.requirements import require_unshare
from tests.entrypoint.conftest import COMMANDS, clean_environment
from tests.train.conftest import free_port

Run = Callable[..., "subprocess.CompletedProcess[str]"]

KEYS = {
    *("scheduler", "launcher", "job_id", "attempt", "hosts", "num_nodes", "node_rank", "local_rank", "tasks_on_node"),
    *("nproc_per_node", "mode", "master_addr", "master_port", "rdzv_id", "interface", "sources", "argv", "env", "site"),
}


def three_lines(text: str) -> tuple[str, str, str]:
    """The three lines of an error message, which has no others: what is wrong, what was seen, what to do."""
    wrong, seen, fix = text.splitlines()
    assert wrong.startswith("error: ")
    assert seen.startswith(" seen: ")
    assert fix.startswith("  fix: ")
    return wrong.removeprefix("error: "), seen.removeprefix(" seen: "), fix.removeprefix("  fix: ")


def test_the_command_line_does_not_load_torch() -> None:
    code = (
        "import sys; import muster.entrypoint.cli; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert answer.stdout.strip() == "[]"


def test_detect_json_has_the_keys_of_the_contract(command: Run, recordings: Path) -> None:
    file = recordings / "slurm" / "c_srun_N2_2per.node02.2.env"
    answer = command("muster", "detect", "--json", "--env-file", str(file))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert set(found) == KEYS
    assert (found["scheduler"], found["launcher"], found["job_id"], found["attempt"]) == ("slurm", "srun", "1", 0)
    assert found["hosts"] == ["node01", "node02"]
    assert found["sources"]["node_rank"] == "SLURM_NODEID=1"
    assert found["env"]["RANK"] == "2"


def test_detect_shows_values_with_their_sources(command: Run, recordings: Path) -> None:
    file = recordings / "slurm" / "b_srun_N2_1per.node02.1.env"
    answer = command("muster", "detect", "--env-file", str(file), env={"COLUMNS": "100"})
    assert answer.returncode == 0, answer.stderr
    for text in ("node rank", "SLURM_NODEID=1", "node01 node02", "--master-port=61009", "would run"):
        assert text in answer.stdout


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("train ddp --dry-run --epochs 3", "train ddp --epochs 3"),
        ("train ddp --env-file FILE --dry_run --epochs=3", "train ddp --epochs=3"),
        ("muster doctor --env-file=FILE --quick", "muster doctor --quick"),
    ],
)
def test_a_dry_run_shows_the_command_of_the_launch_itself(
    command: Run, recordings: Path, words: str, typed: str
) -> None:
    file = recordings / "slurm" / "b_srun_N2_1per.node02.1.env"
    answer = command(*words.replace("FILE", str(file)).split())
    assert answer.returncode == 0, answer.stderr
    assert f"export MUSTER_COMMAND={shlex.quote(typed)}" in answer.stdout.splitlines()


def test_a_refusal_is_three_lines_and_code_2(command: Run, recordings: Path) -> None:
    file = recordings / "slurm" / "a_sbatch_N2.node01.0.env"
    answer = command("train", "ddp", "--epochs", "3", "--env-file", str(file))
    assert answer.returncode == 2
    assert answer.stdout == ""
    wrong, seen, fix = three_lines(answer.stderr)
    assert "2 nodes" in wrong
    assert "SLURM_JOB_NODELIST=node[01-02]" in seen
    assert fix.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 train ddp --epochs 3")


@pytest.mark.parametrize(
    ("arguments", "wrong", "fix"),
    [
        (["ddp", "--epoch", "3"], "--epoch", "--epochs"),
        (["ddp", "--batchsize=3"], "--batchsize", "--batch-size"),
        (["ddp", "--epochs", "many"], "--epochs", "of at least 1"),
        (["ddp", "--epochs", "0"], "--epochs", "of at least 1"),
        (["ddp", "--clip-norm", "inf"], "not a finite number", "--help"),
        (["ddp", "--clip-norm", "0"], "clipped to a norm of 0", "leave it out"),
        (["ddp", "--lr-scale", "cubic"], "--lr-scale", "none or linear or sqrt"),
        (["dpp"], "dpp", "train dp or train ddp"),
        (["FSDP", "--epochs", "3"], "FSDP", "train fsdp --epochs 3"),
        (["xyzzy"], "xyzzy", "--help"),
        (["ddp", "--learning_rate", "1"], "--learning-rate", "train ddp --lr"),
        (["ddp", "--gpus", "2"], "--gpus", "train ddp --nproc-per-node"),
        (["ddp", "--wandb"], "--wandb", "--track wandb"),
        (["ddp", "--pretrained"], "--pretrained", "new weights"),
        (["ddp", "--zzz", "1"], "--zzz", "--help"),
        (["ddp", "--no-dry-run"], "--no-dry-run", "without --no-dry-run"),
        (["ddp", "-epochs", "3"], "-epochs", "train ddp --epochs"),
        (["ddp", "-nproc_per_node=2"], "-nproc_per_node=2", "train ddp --nproc-per-node"),
        (["ddp", "leftover"], "leftover", "--help"),
        (["ddp", "--data=imagefolder:my", "images"], "images", "quotes"),
        (["ddp", "--epochs"], "--epochs", "train ddp --help"),
        (["--epochs", "3"], "--epochs", "train ddp --epochs"),
        (["selftest", "--ranks", "3"], "2, 4 or 8", "--ranks 2"),
        (["ddp", "--nproc-per-node", "some"], "--nproc-per-node", "--nproc-per-node 2"),
    ],
)
def test_a_misspelt_command_line_is_refused_before_anything_starts(
    command: Run, arguments: list[str], wrong: str, fix: str
) -> None:
    answer = command("train", *arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    said = three_lines(answer.stderr)
    assert wrong in said[0]
    assert fix in said[2]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("--model=resnet17", "resnet18"),
        ("--model=gpt-tin", "gpt-tiny"),
        ("--data=imagefolder:/none/images", "--data=imagefolder:"),
        ("--data=digit", "--data=digits"),
        ("--data=imgs", "--data=imagefolder:imgs"),
        ("--data=my imgs", "'--data=imagefolder:my imgs'"),
        ("--name=a/b", "--name=NAME"),
        ("--name=" + "\N{SNOWMAN}" * 86, "--name=NAME"),  # 258 bytes
    ],
)
def test_a_wrong_name_is_refused_before_torch_is_loaded(command: Run, tmp_path: Path, wrong: str, nearest: str) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
    for name in ("imgs", "my imgs"):
        (tmp_path / name).mkdir()
    answer = command("train", "ddp", "--nproc-per-node=1", wrong, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert answer.returncode == 2
    _, seen, fix = three_lines(answer.stderr)
    assert wrong in seen
    assert nearest in fix


def test_a_config_file_is_read_before_torch_is_loaded(command: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
    file = tmp_path / "options.toml"

    def launch(*words: str) -> "subprocess.CompletedProcess[str]":
        return command("train", *words, "--config", "options.toml", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)

    file.write_text('[model]\nmodel = "gpt-tiny"\n[data]\ndata = "synthetic"\n[training]\nepochs = 3\nseed = 4\n')
    planned = launch("tp", "--seed=5", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    started = planned.stdout.splitlines()[-1]
    assert started.endswith("muster.train tp --model=gpt-tiny --data=synthetic --epochs=3 --seed=5")
    wrong = {
        '[model]\nmodel = "gpt-tin"\n': "gpt-tiny",
        '[data]\ndata = "imagefolder:/none/images"\n': "--data=imagefolder:PATH",
        "[training]\nepoch = 3\n": "epochs, in the section [training]",
    }
    for text, fix in wrong.items():
        file.write_text(text)
        refused = launch("ddp", "--nproc-per-node=1")
        assert refused.returncode == 2
        assert fix in three_lines(refused.stderr)[2]
    file.write_text("[training]\nseed = 4\n")
    misspelt = three_lines(launch("ddp", "--epoch=3").stderr)
    assert misspelt[1:] == ("train ddp --epoch=3 --config options.toml", "train ddp --epochs")


def test_a_tilde_means_home_after_an_equals_sign_and_in_a_config_file(command: Run, tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('[run]\nruns_dir = "~/runs"\n')
    env = {"HOME": str(tmp_path / "home")}
    for words in (["--runs-dir=~/runs"], ["--config", "options.toml"]):
        planned = command("train", "ddp", "--dry-run", *words, env=env, cwd=tmp_path)
        assert planned.stdout.splitlines()[-1].endswith(f" --runs-dir={tmp_path}/home/runs"), planned.stderr
    job = command("muster", "job", "slurm", "--image=~/muster.sif", "--", "muster", "run", "x.py", "--to=~/x", env=env)
    assert f'"${{MUSTER_IMAGE:-{tmp_path}/home/muster.sif}}"' in job.stdout
    assert "muster run x.py '--to=~/x'" in job.stdout
    # A user's script gets its arguments unchanged.
    (tmp_path / "x.py").touch()
    assert command("muster", "run", "--dry-run", "x.py", "--to=~/x", cwd=tmp_path).stdout.endswith("x.py '--to=~/x'\n")


def test_a_job_script_may_name_what_is_only_on_its_nodes(command: Run) -> None:
    assert command("muster", "job", "slurm", "--", "train", "tp", "--config=/none/options.toml").returncode == 0
    there = command("muster", "job", "slurm", "--", "train", "ddp", "--data=imagefolder:/none/images")
    assert there.returncode == 0, there.stderr
    assert "--data=imagefolder:/none/images" in there.stdout
    assert command("muster", "job", "slurm", "--", "train", "ddp", "--data=digit").returncode == 2


def test_a_debug_option_of_the_users_script_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    wrong = ["muster", "run", "--nproc-per-node=none"]
    monkeypatch.delenv("MUSTER_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", [*wrong, str(script), "--debug"])
    with pytest.raises(SystemExit) as ended:
        cli.muster()
    assert ended.value.code == 2
    three_lines(capsys.readouterr().err)
    monkeypatch.setattr(sys, "argv", [*wrong, "--debug", str(script)])
    with pytest.raises(SystemExit) as ended:
        cli.muster()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_a_script_that_this_user_may_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.touch(mode=0o000)
    if os.access(script, os.R_OK):  # root may read all files

        def refuse(file: object, *mode: Any, opens: Callable[..., object] = open, **more: Any) -> object:
            if file == str(script):
                raise PermissionError(errno.EACCES, "Permission denied", str(script))
            return opens(file, *mode, **more)

        monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.delenv("MUSTER_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["muster", "run", str(script)])
    with pytest.raises(SystemExit) as ended:
        cli.muster()
    assert ended.value.code == 2
    assert three_lines(capsys.readouterr().err)[0] == "the script can't be read: Permission denied"


def test_dry_run_prints_what_a_shell_would_run_and_runs_nothing(command: Run, tmp_path: Path) -> None:
    script = tmp_path / "a b.py"
    script.write_text("open('started', 'w')\n")
    answer = command("muster", "run", "--dry-run", "--nproc_per_node", "3", str(script), "--dry-run", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "--nproc-per-node=3" in answer.stdout
    assert answer.stdout.rstrip().endswith(f"'{script}' --dry-run")
    assert not (tmp_path / "started").exists()
    # It really is a script for a shell.
    assert subprocess.run(["bash", "-n"], input=answer.stdout, text=True, check=False, timeout=240).returncode == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_help_is_one_screen_of_what_people_use(command: Run, strategy: str) -> None:
    answer = command("train", strategy, "--help", env={"COLUMNS": "80"})
    assert answer.returncode == 0
    lines = answer.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert {"--model", "--data", "--lr", "--name", "--nproc-per-node"} <= options_in(answer.stdout)
    assert f"train {strategy} --help-all" in lines[-1]


@pytest.mark.parametrize("words", [("train", "fsdp"), ("muster", "run"), ("muster", "doctor"), ("muster", "detect")])
def test_all_options_are_shown_on_request_and_fit_80_columns(command: Run, words: tuple[str, str]) -> None:
    answer = command(*words, "--help-all", env={"COLUMNS": "80"})
    assert answer.returncode == 0
    assert max(map(len, answer.stdout.splitlines())) <= 80
    shown = options_in(answer.stdout)
    assert {"--" + field.name.replace("_", "-") for field in fields(LaunchOptions)} <= shown
    if words == ("train", "fsdp"):
        others = {"--tensor-parallel", "--zero1", "--microbatches"}
        assert not others & shown
        assert {"--lr-end", "--hang-timeout", "--cpu-offload", "--replicate"} <= shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train export", {"RUN", "--to"}),
        ("train pack", {"FOLDER", "OUT", "--shard-mb"}),
        ("train selftest", {"--ranks"}),
        ("muster job", {"SITE", "-- COMMAND", "--nodes", "--device", "[1:00:00]"}),
        ("muster site", {"NAME|FILE|list", "--env-file"}),
        ("muster report", {"RUN...", "--output"}),
        ("muster version", {"--json"}),
        ("muster fabric binds", {"--format apptainer|podman|docker", "--root FOLDER", "[/host]"}),
    ],
)
def test_the_help_of_commands_with_few_options_looks_as_that_of_trainings(
    command: Run, words: str, shown: set[str]
) -> None:
    answer = command(*words.split(), "-h", env={"COLUMNS": "80"})
    lines = answer.stdout.splitlines()
    assert lines[0].startswith(f"Usage: {words} [OPTIONS]")
    assert max(map(len, lines)) <= 80
    for name in shown:
        assert re.search(rf"^  {re.escape(name)}( |$)|{re.escape(name)}$", answer.stdout, re.M), (name, answer.stdout)
    assert not {"─", "<"} & set(answer.stdout)  # typer's own help has boxes, and <int range> for a number


def test_help_on_a_narrow_terminal_is_all_there(command: Run) -> None:
    answer = command("train", "ddp", "--help", env={"COLUMNS": "20"})
    assert answer.returncode == 0, answer.stderr
    assert {"--model", "--data", "--lr", "--name", "--nproc-per-node"} <= options_in(answer.stdout)


def options_in(text: str) -> set[str]:
    """The options that a help text has a row for."""
    return set(re.findall(r"(--[a-z0-9-]+)", "\n".join(line for line in text.splitlines() if re.match("  -", line))))


HELLO = """
import os, sys
import neighbour
# One write: the ranks share a pipe, and python -u writes each argument of print by itself.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {neighbour.WORD} {sys.argv[1:]}\\n")
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    """A user's script, next to a module that it imports and to files that have names of our modules."""
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    (tmp_path / "hello.py").write_text(HELLO)
    for name in ("train.py", "entrypoint.py", "agent.py"):
        (tmp_path / name).write_text("raise SystemExit('the file of the user was started')\n")
    return tmp_path / "hello.py"


@pytest.mark.process
def test_a_users_script_runs_on_every_rank_and_finds_its_neighbours(command: Run, hello: Path) -> None:
    answer = command("muster", "run", str(hello), "0", "--x=1", cwd=hello.parent)
    assert answer.returncode == 0, answer.stderr
    expected = [f"rank {rank} of 2 found ['0', '--x=1']" for rank in (0, 1)]
    assert sorted(answer.stdout.splitlines()) == expected
    said = [line for line in answer.stderr.splitlines() if "loading PyTorch" not in line]
    assert said == ["muster: local: 1 node x 2 = 2 ranks, meeting on this host over lo"]


def test_debug_among_the_scripts_own_arguments_is_the_scripts(command: Run, hello: Path) -> None:
    wrong = ["--nnodes=2", "--node-rank=7", str(hello)]
    answer = command("muster", "run", *wrong, "--debug", cwd=hello.parent)
    assert (answer.returncode, len(answer.stderr.splitlines())) == (2, 3), answer.stderr
    assert "Traceback" in command("muster", "run", "--debug", *wrong, cwd=hello.parent).stderr


@pytest.mark.process
def test_a_users_module_runs_from_the_working_directory(command: Run, hello: Path) -> None:
    answer = command("muster", "run", "--nproc-per-node=1", "-m", "hello", "0", cwd=hello.parent)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["rank 0 of 1 found ['0']"]


@pytest.mark.process
@pytest.mark.parametrize("code", [2, 3, 75])
def test_a_failing_rank_of_an_own_script_is_named_and_ends_the_launch_with_1(
    command: Run, hello: Path, code: int
) -> None:
    answer = command("muster", "run", str(hello), str(code), cwd=hello.parent)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    wrong, _, fix = three_lines("\n".join(answer.stderr.splitlines()[-3:]))
    assert f"rank 1 on {socket.gethostname()} ended with exit code {code}" in wrong
    # --debug shows tracebacks of this project's programs alone.
    assert "--debug" not in fix
    assert "--tee 3" in fix


# The agent ends all ranks when the first one ends, so each waits until the other has started.
FAILS = """
import os, sys, time
folder, code = sys.argv[1:]
own, other = (f"{folder}/{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}" for rank in
              (int(os.environ["RANK"]), 1 - int(os.environ["RANK"])))
print("started", flush=True)
open(own, "w").close()
end = time.monotonic() + 100
while not os.path.exists(other) and time.monotonic() < end:
    time.sleep(0.01)
raise SystemExit(int(code))
"""


@pytest.mark.process
@pytest.mark.parametrize(("code", "attempts"), [(2, 3), (75, 3)])
def test_an_own_script_is_started_again_whatever_its_code(
    command: Run, tmp_path: Path, code: int, attempts: int
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    answer = command("muster", "run", "--nproc-per-node=2", "--max-restarts=2", str(script), str(tmp_path), str(code))
    assert (answer.returncode, answer.stdout.count("started")) == (1, 2 * attempts), answer.stderr


@pytest.mark.process
@pytest.mark.parametrize(("name", "words"), [("SIGKILL", "memory"), ("SIGSEGV", "PYTHONFAULTHANDLER=1")])
def test_a_worker_killed_by_a_signal_is_named(command: Run, tmp_path: Path, name: str, words: str) -> None:
    script = tmp_path / "killed.py"
    script.write_text(f"import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.{name})\n")
    answer = command("muster", "run", str(script))
    assert answer.returncode == 1
    wrong, _, fix = three_lines("\n".join(answer.stderr.splitlines()[-3:]))
    assert "rank 1" in wrong
    assert name in wrong
    assert words in fix
    assert "--" not in fix  # a trainer's options, which a user's script does not have


@pytest.mark.process
def test_a_taken_port_is_named_and_nothing_starts(command: Run, hello: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        where = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        answer = command("muster", "run", *where, str(hello), "0")
    assert answer.returncode == 2
    wrong, seen, fix = three_lines(answer.stderr)
    assert f"port {port}" in wrong
    assert str(port) in seen
    assert "--master-port" in fix
    assert answer.stdout == ""


@pytest.mark.process
def test_a_master_that_never_comes_has_a_deadline_and_a_name(command: Run, hello: Path) -> None:
    port = free_port()
    where = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-timeout=2"]
    answer = command("muster", "run", *where, str(hello), "0")
    assert answer.returncode == 1
    wrong, seen, _ = three_lines(answer.stderr)
    assert f"127.0.0.1:{port}" in wrong
    assert "2 s" in seen


@pytest.mark.process
def test_two_nodes_by_hand_on_one_machine(command: Run, hello: Path) -> None:
    port = free_port()
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"]
    first = subprocess.Popen(
        [str(Path(sys.executable).parent / "muster"), "run", *where, "--node-rank=1", str(hello), "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        second = command("muster", "run", *where, "--node-rank=0", str(hello), "0")
        out, _ = first.communicate(timeout=240)
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 0, second.stderr
    assert first.returncode == 0
    assert sorted([*out.splitlines(), *second.stdout.splitlines()]) == [f"rank {i} of 2 found ['0']" for i in (0, 1)]


@pytest.mark.process
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_node_that_can_not_start_ends_the_others(command: Run, hello: Path, refusing: int) -> None:
    """As where one node lacks a script, or the fabric: otherwise the other nodes would wait for 15 minutes."""
    port = free_port()
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"]
    scripts = ["no-such-script.py" if rank == refusing else str(hello) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(command, "muster", "run", *where, f"--node-rank={rank}", script, "0")
            for rank, script in enumerate(scripts)
        ]
        done = [answer.result() for answer in answers]
    assert [one.returncode for one in done] == [2, 2]
    wrong, seen, fix = three_lines("\n".join(done[1 - refusing].stderr.splitlines()[-3:]))
    assert f"{socket.gethostname()} can't take part: there is no such script" in wrong
    assert "no-such-script.py" in seen
    assert "muster run" in fix
    assert done[refusing].stderr.count("error: ") == 1
    assert "".join(one.stdout for one in done) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.py"],
        ["run", ""],  # as "$SCRIPT" where the variable is not set
        ["run", "a" * 300 + ".py"],  # longer than any file's name
        ["run", "--no-python", "no-such-program"],
        ["run", "--framework=jax", "--", "no-such-program"],
        ["run", "-m", "--no-python", "x"],
        ["run", "-m", "no_such_package.module"],
        ["run", "-m", "mine.py"],
        ["run", "-m", ""],
        ["run"],
    ],
)
def test_a_program_that_can_not_be_started_is_refused(command: Run, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "mine.py").touch()
    answer = command("muster", *arguments, cwd=tmp_path)
    assert answer.returncode == 2
    assert three_lines(answer.stderr)[1], "nothing was seen"


def test_a_folder_in_place_of_a_script_is_told(command: Run, tmp_path: Path) -> None:
    (tmp_path / "my code").mkdir()
    answer = command("muster", "run", "my code", cwd=tmp_path)
    wrong, seen, fix = three_lines(answer.stderr)
    assert (answer.returncode, seen) == (2, "my code")
    assert "folder" in wrong
    assert fix.startswith("muster run 'my code/SCRIPT.py'")
    assert "-m" in fix
    (tmp_path / "my code" / "__main__.py").write_text("import sys; print(sys.argv)\n")
    answer = command("muster", "run", "--nproc-per-node=1", "my code", "x", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "['my code', 'x']\n")


def test_an_interface_that_is_not_here_is_told_before_a_script_starts(command: Run, hello: Path) -> None:
    answer = command("muster", "run", "--nproc-per-node=2", "--interface=nosuch0", str(hello))
    assert answer.returncode == 2
    wrong, seen, _ = three_lines(answer.stderr)
    assert "nosuch0" in wrong
    assert " lo" in seen
    # A dry run may be for nodes with other interfaces.
    assert command("muster", "run", "--dry-run", "--interface=nosuch0", str(hello)).returncode == 0
    # After "=" NCCL takes whole names, not prefixes.
    assert command("muster", "run", "--nproc-per-node=2", "--interface==l", str(hello)).returncode == 2
    # Of a list, one interface has to exist here.
    assert command("muster", "run", "--nproc-per-node=1", "--interface=nosuch0,lo", str(hello)).returncode == 0


def test_a_loopback_interface_that_is_down_is_told_and_not_waited_for(hello: Path) -> None:
    namespace = ("--user", "--map-root-user", "--net")
    require_unshare(*namespace)
    run = f"{COMMANDS / 'muster'} run --nproc-per-node"
    words = ["unshare", *namespace, "sh", "-c", f'{run} 2 "$0"; echo $?; {run} 1 "$0"', str(hello)]
    answer = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False)
    _, seen, fix = three_lines(answer.stderr.partition("\nmuster:")[0])
    assert answer.stdout.splitlines()[0] == "2"
    assert "127.0.0.1" in seen
    assert "ip link set lo up" in fix
    assert answer.returncode == 0, answer.stderr  # a single rank needs no network


@pytest.mark.parametrize(
    "wrong",
    [
        "--tee=9",
        "--log-dir=x.py",
        "--log-dir=/proc/none",
        "--event-log-handler=none",
        "--monitor-interval=-1",
        "--rdzv-timeout=99999999999",
        "--rdzv-conf=timeout=0",
        "--rdzv-conf=timeout=\N{SUPERSCRIPT TWO}",
        "--rdzv-conf=timeout=" + "9" * 5000,
    ],
    ids=lambda wrong: wrong[:25],
)
def test_a_value_that_torchruns_option_does_not_take_is_no_fault_of_the_network(
    command: Run, tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "x.py").touch()
    answer = command("muster", "run", "--nproc-per-node=2", wrong, "x.py", cwd=tmp_path)
    assert answer.returncode == 2
    assert "did not meet" not in answer.stderr
    three_lines("\n".join(line for line in answer.stderr.splitlines() if not line.startswith("muster: ")))


@pytest.mark.parametrize(
    "words",
    ["train ddp", "muster run --debug-distributed '{script}'", "train selftest", "train export /a", "train pack /a /b"],
)
def test_a_working_directory_that_was_removed_is_told(tmp_path: Path, words: str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "gone"
    script.touch()
    folder.mkdir()
    line = f"rmdir '{folder}' && '{COMMANDS}'/{words.format(script=script)}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stderr
    assert "the working directory" in three_lines(done.stderr)[0]


def test_torchruns_options_after_the_script_are_its_own_and_a_line_says_so(command: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\n")
    (tmp_path / "spawns.py").write_text("parser.add_argument('--nproc_per_node')\n")
    for script, is_told in (("plain.py", True), ("spawns.py", False)):
        answer = command("muster", "run", "--nproc-per-node=1", script, "--nproc-per-node=4", "--lr=1", cwd=tmp_path)
        assert ("--nproc-per-node, given after it" in answer.stderr) == is_told
        assert "--lr" not in answer.stderr


def test_an_unknown_site_is_refused_with_the_variable_that_names_it(command: Run) -> None:
    answer = command("train", "ddp", "--dry-run", env={"MUSTER_SITE": "nosuch"})
    assert answer.returncode == 2
    assert "MUSTER_SITE=nosuch" in three_lines(answer.stderr)[1]


@pytest.mark.parametrize(
    "words",
    [
        *(("muster", "job", "slurm"), ("muster", "env"), ("train", "ddp", "--dry-run"), ("muster", "--version")),
        ("muster", "fabric", "check", "--fabric=off"),
    ],
)
def test_output_that_can_not_be_written_is_told(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:  # every write to it fails as on a full disk
        argv = [str(COMMANDS / words[0]), *words[1:]]
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, env=clean_environment(), text=True, timeout=240, check=False
        )
    assert done.returncode == 1
    assert "No space left" in three_lines(done.stderr)[0]


@pytest.mark.parametrize(
    "words",
    [
        *(
            ("muster", "job", "slurm"),
            ("muster", "detect", "--json"),
            ("train", "ddp", "--dry-run"),
            ("train", "--version"),
        ),
        ("muster", "fabric", "check", "--fabric=off"),
    ],
)
def test_a_closed_pipe_is_no_error(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [str(COMMANDS / words[0]), *words[1:]]
    with os.fdopen(write) as pipe:
        done = subprocess.run(
            argv, stdout=pipe, stderr=subprocess.PIPE, env=clean_environment(), text=True, timeout=240, check=False
        )
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    line = f"'{COMMANDS}/train' ddp --dry-run {closed}"
    done = subprocess.run(["bash", "-c", line], env=clean_environment(), capture_output=True, timeout=240, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_a_launch_without_open_streams_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import pathlib, sys\nprint('to nobody')\npathlib.Path('ran').touch()\n")
    line = f"'{COMMANDS}/muster' run --nproc-per-node 1 script.py <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], env=clean_environment(), cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()


def test_output_works_on_a_terminal_without_unicode_or_with_few_columns(command: Run) -> None:
    shown = command("muster", "site", "juwels-booster", env={"PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "J\\xfclich" in shown.stdout
    narrow = command("train", "ddp", "--help", env={"COLUMNS": "20"})
    assert (narrow.returncode, narrow.stderr) == (0, "")


def test_what_detect_records_it_reads_back(command: Run, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node01", "SLURMD_NODENAME": "node01"}
    written = command("muster", "detect", "--record", "job.env", env=job, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert {f"{name}={value}" for name, value in job.items()} <= set((tmp_path / "job.env").read_text().splitlines())
    found = json.loads(command("muster", "detect", "--env-file", "job.env", "--json", cwd=tmp_path).stdout)
    assert (found["scheduler"], found["job_id"], found["hosts"]) == ("slurm", "7", ["node01"])


def test_a_file_with_an_escape_code_in_its_name_is_recorded_and_sends_none(command: Run, tmp_path: Path) -> None:
    written = command("muster", "detect", "--record", "a\x1b[31m.env", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "a\x1b[31m.env").is_file()
    assert written.stderr.startswith(r"written: a\x1b[31m.env;")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("train pip", {"pipeline"}),
        ("muster do", {"doctor"}),
        ("train ddp --max-s", {"--max-steps"}),
        ("train ddp --model gpt-t", {"gpt-tiny"}),
        ("train ddp --model resnet1", {"resnet101", "resnet152", "resnet18"}),
        ("train ddp --data s", {"synthetic", "shards:"}),
        ("train ddp --name f", {"first"}),
    ],
)
def test_a_shell_completes(command: Run, tmp_path: Path, typed: str, found: set[str]) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    name, *words = typed.split()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words)), f"_{name.upper()}_COMPLETE": "complete_bash"}
    answer = command(name, cwd=tmp_path, env=asked)
    assert (set(answer.stdout.split()), answer.stderr) == (found, "")


def test_completion_is_installed(tmp_path: Path) -> None:
    # Started by a shell that waits for it: typer looks for its parent process to learn which shell is used.
    words = ["bash", "-c", '"$0" --install-completion; exit $?', str(COMMANDS / "train")]
    env = {**clean_environment(), "HOME": str(tmp_path)}
    answer = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "train" in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize("name", ["train", "muster"])
def test_a_home_that_can_not_be_written_to_is_told_as_completion_is_installed(tmp_path: Path, name: str) -> None:
    (tmp_path / "home").touch()
    words = ["bash", "-c", '"$0" --install-completion; exit $?', str(COMMANDS / name)]
    env = {**clean_environment(), "HOME": str(tmp_path / "home")}
    answer = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)
    _, seen, fix = three_lines(answer.stderr)
    assert (answer.returncode, seen) == (2, str(tmp_path / "home"))
    assert f"{name} --show-completion" in fix


def test_a_shells_file_that_is_no_text_in_utf_8_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_bytes(b"# \xe9\n")
    words = ["bash", "-c", '"$0" --install-completion; exit $?', str(COMMANDS / "train")]
    env = {**clean_environment(), "HOME": str(tmp_path)}
    answer = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert answer.returncode == 2
    assert "train --show-completion" in three_lines(answer.stderr)[2]
    assert (tmp_path / ".bashrc").read_bytes() == b"# \xe9\n"


def test_a_misspelt_command_is_told_the_nearest(command: Run) -> None:
    assert three_lines(command("muster", "docter").stderr)[1:] == ("muster docter", "muster doctor")


@pytest.mark.parametrize("name", ["muster", "train"])
def test_each_command_has_one_line_of_help_on_80_columns(command: Run, name: str) -> None:
    commands = command(name, "--help", env={"COLUMNS": "80"}).stdout.partition("─ Commands ─")[2].partition("╰")[0]
    lines = commands.splitlines()[1:]
    assert len(lines) >= 8
    assert [line for line in lines if line.startswith("│  ")] == []


def test_what_may_be_left_out_stands_in_one_pair_of_brackets(command: Run) -> None:
    usage = [command("muster", name, "--help").stdout.strip().splitlines()[0] for name in ("job", "site")]
    assert not any("[[" in line or "]]" in line for line in usage), usage


@pytest.mark.parametrize(
    "place",
    ["cwd", pytest.param("PYTHONPATH", marks=pytest.mark.full), pytest.param("package", marks=pytest.mark.full)],
)
def test_a_users_module_named_train_is_not_started_in_place_of_ours(command: Run, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "train" if place == "package" else tmp_path
    folder.mkdir(exist_ok=True)
    for name in ("__init__.py", "__main__.py", "options.py") if place == "package" else ("train.py",):
        (folder / name).write_text("raise SystemExit('the file of the user was started')\n")
    env = {} if place == "cwd" else {"PYTHONPATH": str(tmp_path)}
    # Our trainer reports that the folder has no data, after the launch: so our modules were used up to there.
    answer = command("train", "ddp", f"--data=shards:{tmp_path}", env=env, cwd=tmp_path)
    assert answer.returncode == 2
    assert f"shards:{tmp_path}" in answer.stderr
    assert "of the user" not in answer.stderr + answer.stdout


def test_options_of_torchrun_are_taken_by_both_spellings(command: Run, hello: Path) -> None:
    given = ["--standalone", "--rdzv_backend=c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id=7", "--tee", "3"]
    given += ["--log_dir=logs", "-r", "3", "--local-ranks-filter=0", "--role=trainer", "--rdzv_conf=timeout=60"]
    given += [
        "--monitor-interval=1",
        "--start-method=spawn",
        "--signals-to-handle=SIGTERM,SIGINT",
        "--virtual-local-rank",
    ]
    answer = command("muster", "run", "--dry-run", "--nproc-per-node=2", *given, str(hello), "--tee=1")
    assert answer.returncode == 0, answer.stderr
    words = shlex.split(answer.stdout.splitlines()[-1])
    passed = words[words.index("muster.entrypoint.agent") + 1 : words.index(str(hello))]
    assert {"--tee=3", "--log-dir=logs", "--redirects=3", "--local-ranks-filter=0", "--role=trainer"} <= set(passed)
    assert {"--rdzv-id=7", "--monitor-interval=1.0", "--start-method=spawn", "--virtual-local-rank"} <= set(passed)
    assert words[-1] == "--tee=1"
    # torchrun itself can parse them.
    assert parse_args([*passed, str(hello)]).role == "trainer"
    newer = ["--shutdown-timeout=60", "--log-line-prefix-template=${rank}: "]
    answer = command("muster", "run", "--dry-run", "--nproc-per-node=2", *newer, str(hello))
    assert set(newer) <= set(shlex.split(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--standalone", "--nnodes=2"], "--standalone"),
        (["--rdzv-conf=is_host=1"], "--rdzv-conf"),
        (["--rdzv-endpoint=a:b"], "--rdzv-endpoint"),
        (["--rdzv-endpoint=http://a:29500"], "--rdzv-endpoint"),
        (["--signals-to-handle=SIGUSR3"], "signals"),
        (["--spawn=2", "--tee=3"], "--spawn"),
        (["--spawn=2", "--nproc-per-node=3"], "two numbers of processes"),
        (["--rdzv-id=a/b"], "--rdzv-id"),
        (["--rdzv-id=" + "\N{SNOWMAN}" * 70], "--rdzv-id"),
    ],
)
def test_options_of_torchrun_that_contradict_the_launch_are_refused(
    command: Run, hello: Path, words: list[str], wrong: str
) -> None:
    answer = command("muster", "run", "--dry-run", *words, str(hello))
    assert answer.returncode == 2
    assert wrong in three_lines(answer.stderr)[0]


def test_the_is_host_setting_that_jsc_gives_torchrun_is_refused(command: Run, hello: Path) -> None:
    """JSC gives torchrun --rdzv_conf=is_host=$((SLURM_NODEID == 0)); to add --rdzv-timeout does not help."""
    answer = command("muster", "run", "--dry-run", "--rdzv_conf=is_host=1", "--rdzv-timeout=60", str(hello))
    assert "leave it out" in three_lines(answer.stderr)[2]


def test_an_endpoint_of_torchrun_is_the_place_to_meet(command: Run, hello: Path) -> None:
    where = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=127.0.0.1:29501"]
    answer = command("muster", "run", "--dry-run", "--nproc-per-node=1", *where, str(hello))
    assert answer.returncode == 0, answer.stderr
    assert "--master-addr=127.0.0.1 --master-port=29501" in answer.stdout


@pytest.mark.parametrize(
    ("words", "end"), [(["python3", "-u", "hello.py"], "hello.py"), (["python", "-m", "hello"], "-m hello")]
)
def test_python_may_stand_before_the_script(command: Run, hello: Path, words: list[str], end: str) -> None:
    answer = command("muster", "run", "--dry-run", "--nproc-per-node=2", *words, "x", cwd=hello.parent)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.rstrip().endswith(f" --max-restarts=0 {end} x")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["torchrun", "--standalone", "hello.py", "x"], ["--standalone", "hello.py", "x"]),
        (["--no-python", "/usr/bin/torchrun", "hello.py"], ["hello.py"]),
        (["-m", "torch.distributed.run", "hello.py"], ["hello.py"]),
        (["python3", "-u", "-m", "torch.distributed.launch", "hello.py"], ["hello.py"]),
        (["python", "/usr/bin/torchrun", "hello.py"], ["hello.py"]),
        (["--no-python", "accelerate", "launch", "--num_processes", "2", "hello.py", "x"], ["hello.py", "x"]),
        (["python", "-m", "accelerate.commands.launch", "--multi_gpu", "hello.py", "x"], ["hello.py", "x"]),
        (["python", "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "hello.py"], ["hello.py"]),
        (["composer", "-n", "2", "hello.py", "x"], ["hello.py", "x"]),
        (["-m", "composer.cli", "-n", "2", "hello.py"], ["hello.py"]),
        (["-m", "lightning.fabric.cli", "run", "--devices", "2", "hello.py"], ["hello.py"]),
        (["--no-python", "fabric", "run", "--devices", "2", "hello.py", "x"], ["hello.py", "x"]),
        # torchtune's launcher starts processes only if an option of torchrun stands before the recipe.
        (
            ["--no-python", "./tune", "run", "--nnodes", "1", "hello", "--config", "c.yaml", "x=1"],
            ["--nnodes", "1", "--no-python", "./tune", "run", "hello", "--config", "c.yaml", "x=1"],
        ),
    ],
)
def test_another_launcher_in_each_rank_is_refused(command: Run, hello: Path, words: list[str], rest: list[str]) -> None:
    """Each rank would start that launcher, and train in a world of its own."""
    (hello.parent / "tune").touch(0o700)
    answer = command("muster", "run", "--nproc-per-node=2", *words, cwd=hello.parent)
    assert answer.returncode == 2
    fix = shlex.split(three_lines(answer.stderr)[2])
    assert fix == ["muster", "run", "--nproc-per-node=2", *rest]
    assert command("muster", "run", "--dry-run", *fix[2:], cwd=hello.parent).returncode == 0


def test_a_launcher_without_a_script_is_told_where_one_stands(command: Run, hello: Path) -> None:
    answer = command("muster", "run", "--no-python", "accelerate", "launch", "--multi_gpu", cwd=hello.parent)
    assert answer.returncode == 2
    assert three_lines(answer.stderr)[2] == "muster run SCRIPT.py"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mpirun", "-np", "2", "python", "hello.py", "x"], "mpirun -np 2 muster run python hello.py x"),
        (["--no-python", "/usr/bin/mpiexec", "-n", "2", "hello.py"], "/usr/bin/mpiexec -n 2 muster run hello.py"),
        (["--no-python", "mpiexec.hydra", "-n", "2", "hello.py"], "mpiexec.hydra -n 2 muster run hello.py"),
        (
            ["--nproc-per-node=2", "--no-python", "srun", "-N2", "python3", "hello.py"],
            "srun -N2 muster run --nproc-per-node=2 python3 hello.py",
        ),
    ],
)
def test_a_program_that_starts_tasks_has_to_stand_before_muster_run(
    command: Run, hello: Path, words: list[str], told: str
) -> None:
    """Under `muster run`, each rank would start all tasks."""
    answer = command("muster", "run", *words, cwd=hello.parent)
    assert answer.returncode == 2
    assert three_lines(answer.stderr)[2] == told


def test_an_option_of_python_is_refused_with_a_command_that_takes_it(command: Run, hello: Path) -> None:
    for words in (["-O", str(hello)], ["-c", "print('a b')"]):
        answer = command("muster", "run", "--nproc-per-node=1", "python", *words)
        assert answer.returncode == 2
        told = ["muster", "run", "--no-python", "--nproc-per-node=1", "python", *words]
        assert three_lines(answer.stderr)[2] == shlex.join(told)


def test_a_script_in_the_place_of_an_options_value_is_told(command: Run, hello: Path) -> None:
    answer = command("muster", "run", "--dry-run", "--nproc-per-node", hello.name, cwd=hello.parent)
    assert answer.returncode == 2
    wrong, _, fix = three_lines(answer.stderr)
    assert f"{hello.name} was taken for the value of --nproc-per-node" in wrong
    assert fix == f"muster run --nproc-per-node VALUE {hello.name}"


def test_a_program_that_is_not_python_is_refused_with_the_option_for_it(command: Run, tmp_path: Path) -> None:
    (tmp_path / "prog.sh").write_text("#!/bin/sh\necho\n")
    (tmp_path / "prog.sh").chmod(0o700)
    for name in ("./prog.sh", "prog.sh"):
        answer = command("muster", "run", name, "a b", cwd=tmp_path)
        assert answer.returncode == 2
        fix = shlex.split(three_lines(answer.stderr)[2])
        assert fix == ["muster", "run", "--no-python", "./prog.sh", "a b"]
        assert command(*fix[:2], "--dry-run", *fix[2:], cwd=tmp_path).returncode == 0


def test_both_commands_have_a_version(command: Run) -> None:
    for name in ("muster", "train"):
        answer = command(name, "--version")
        assert answer.returncode == 0
        assert answer.stdout.startswith(f"{name} ")


def test_the_doctor_waits_as_long_as_it_is_told(command: Run) -> None:
    where = ["--dry-run", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=29501"]
    for given, limit in (([], 120), (["--rdzv-timeout", "900"], 900), (["--rdzv_timeout=900"], 900)):
        answer = command("muster", "doctor", *where, *given)
        assert f"--rdzv-conf=timeout={limit} " in answer.stdout, answer.stderr


@pytest.mark.parametrize("words", [["--max-restarts=3"], ["--nnodes=1:2"], ["--numa-binding=node"], ["--spawn=2"]])
def test_options_that_need_torchrun_are_refused_where_the_scheduler_starts_each_rank(
    command: Run, recordings: Path, hello: Path, words: list[str]
) -> None:
    file = recordings / "slurm" / "c_srun_N2_2per.node02.2.env"
    answer = command("muster", "run", "--env-file", str(file), *words, str(hello))
    assert answer.returncode == 2
    name = words[0].partition("=")[0]
    assert name in "\n".join(three_lines(answer.stderr))
    assert set(re.findall("--nproc-per-node|--spawn", answer.stderr)) <= {name}
    noted = command("muster", "run", "--env-file", str(file), "--tee=3", str(hello))
    assert noted.returncode == 0, noted.stderr


def test_a_process_of_jax_is_a_task(command: Run, hello: Path) -> None:
    answer = command("muster", "run", "--dry-run", "--framework=jax", str(hello))
    assert answer.returncode == 0, answer.stderr
    # Python runs a script.
    assert answer.stdout.rstrip().endswith(f"-u {hello}")
    answer = command("muster", "run", "--dry-run", "--framework=jax", "--nproc-per-node=2", str(hello))
    assert answer.returncode == 2
    assert "--nproc-per-node" in three_lines(answer.stderr)[0]


def test_the_variables_for_a_shell_are_those_of_one_process(command: Run, recordings: Path) -> None:
    """There is one task on each of two nodes: nothing would start a second rank next to it."""
    file = recordings / "slurm" / "b_srun_N2_1per.node02.1.env"
    answer = command("muster", "env", "--env-file", str(file))
    assert {"export RANK=1", "export WORLD_SIZE=2", "export LOCAL_WORLD_SIZE=1"} <= set(answer.stdout.splitlines())
    for option in ("--nproc-per-node=2", "--spawn=2"):
        answer = command("muster", "env", "--env-file", str(file), option)
        assert answer.returncode == 2
        assert option in three_lines(answer.stderr)[1]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_variables_for_a_shell_have_an_address_or_there_are_none(command: Run, framework: str) -> None:
    """With mpirun over ssh nothing lists the hosts: a launch meets by a file, which `muster env` can't do."""
    ranks = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    job = {f"OMPI_COMM_WORLD_{name}": value for name, value in ranks.items()}
    job |= {"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}
    answer = command("muster", "env", f"--format={framework}", env=job)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "--master-addr" in three_lines(answer.stderr)[2]
    answer = command("muster", "env", f"--format={framework}", "--master-addr=192.0.2.1", env=job)
    assert "192.0.2.1" in answer.stdout


@pytest.mark.parametrize("words", [["--lr=x"], ["--zero1", "--lr=x"], ["--no-such"]], ids=" ".join)
def test_options_that_all_nodes_refuse_are_reported_by_the_first_node_only(command: Run, words: list[str]) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NTASKS": "2"}
    job |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[01-02]"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    told: list[str] = []
    for rank in (0, 1):
        own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURMD_NODENAME": f"node0{rank + 1}"}
        answer = command("train", "fsdp", *words, env={**job, **own})
        assert answer.returncode == 2
        told.append(answer.stderr)
    three_lines(told[0])
    assert told[1] == ""
