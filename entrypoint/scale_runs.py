"""The runs of `train scale`: one after the other, and then their report."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from entrypoint import launch
from entrypoint.scale import Plan
from train.errors import FAILED, PREEMPTED, USER_MUST_CHANGE, MusterError

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

START = "from entrypoint.cli import train; train()"


def run(planned: Plan, strategy: str, typed: Sequence[str], *, may_number: bool) -> int:
    """The report's exit code, after making the runs and the report.

    Args:
        may_number: whether another name may be taken where there are such runs already.

    Raises:
        MusterError: the folder is taken or can't be made, or a run failed: then the later ones are not started.
    """
    planned = _with_folder(planned, may_number=may_number)
    record = {
        "kind": planned.kind,
        "worlds": list(planned.worlds),
        "runs": [f"w{world}" for world in planned.worlds],
        "strategy": strategy,
        "command": shlex.join(typed),
        "cores": planned.cores,
        "threads": planned.threads,
    }
    (planned.folder / "scale.json").write_text(json.dumps(record, indent=2) + "\n")
    for note in planned.notes:
        print(f"muster: {note}", file=sys.stderr)
    env = {**os.environ, **launch.ours_first(os.environ), **planned.variables}
    for number, (world, words) in enumerate(zip(planned.worlds, planned.commands, strict=True), start=1):
        print(f"muster: run {number} of {len(planned.worlds)}, on {_ranks(world)}", file=sys.stderr, flush=True)
        code, stopped_by = wait([sys.executable, "-c", START, *words], env)
        if code:
            ended = f"was stopped by {stopped_by}" if stopped_by else f"ended with exit code {code}"
            done = f"done: {', '.join(f'w{one}' for one in planned.worlds[: number - 1]) or 'none'}"
            raise MusterError(
                f"the run on {_ranks(world)} {ended}: the later ones were not started",
                seen=f"{shlex.join(['train', *words])}; {done}",
                fix=f"muster report {shlex.quote(str(planned.folder))} shows those that are done"
                if stopped_by
                else f"see what it said above; without this world: --world {_without(planned.worlds, world)}",
                code=code if code in (USER_MUST_CHANGE, PREEMPTED) else FAILED,
            )
    return subprocess.run([sys.executable, "-m", "report", str(planned.folder)], env=env, check=False).returncode


def _ranks(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def _without(worlds: Sequence[int], world: int) -> str:
    return ",".join(str(other) for other in worlds if other != world) or "1"


def _with_folder(planned: Plan, *, may_number: bool) -> Plan:
    """`planned`, its folder made: another one where the name is taken."""
    base, number = planned.folder, 1
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
            try:
                folder.mkdir()
                break
            except FileExistsError:
                if not may_number:
                    raise MusterError(
                        "there is a folder of this name already, and runs are never overwritten",
                        seen=str(base),
                        fix="another --name",
                    ) from None
                number += 1
    except OSError as error:
        raise MusterError(
            f"the runs' folder can't be made: {error.strerror}",
            seen=f"--runs-dir ({error.filename})",
            fix="--runs-dir=FOLDER that this user may write",
        ) from None
    if folder == base:
        return planned
    old, new = f"--runs-dir={base}", f"--runs-dir={folder}"
    commands = tuple(tuple(new if word == old else word for word in words) for words in planned.commands)
    return replace(planned, folder=folder, commands=commands)


def wait(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of `argv`, however long it takes, and the last signal to this process, which passed it on."""
    child: list[subprocess.Popen[bytes]] = []
    seen: list[int] = []

    def forward(number: int, _: object) -> None:
        # What comes before the child is there is for it too.
        seen.append(number)
        if child:
            child[0].send_signal(number)

    # What is ignored stays ignored, in the child too: nohup.
    heard = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        # A group of its own: Ctrl-C at a terminal would reach it a second time.
        child.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, process_group=0))
        for number in tuple(seen):
            child[0].send_signal(number)
        code = child[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return FAILED if code < 0 else code, signal.Signals(seen[-1]).name if seen else ""
