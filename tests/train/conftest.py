"""Fixtures: trainer processes with deadlines, folders of images."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SMALL = ["--data=digits", "--image-size=16", "--no-bf16", "--batch-size=8"]


TOLD = pytest.StashKey[dict[str, list[str]]]()
"""Lines that passing tests add to the report at the end of the session, by title."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(TOLD, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Adds a line below a title to the report at the end of the session."""
    told = pytestconfig.stash.setdefault(TOLD, {})
    return lambda title, line: told.setdefault(title, []).append(line)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A free port, below the range from which the system gives ports to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """An environment for a trainer with the few variables that any job has, and none of a launcher around the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    # GPUs are hidden where there are some: these tests are about several ranks, exact sums and gloo.
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **own, **extra}


def rank_environments(
    world_size: int, env: Mapping[str, str], rank_env: Mapping[int, Mapping[str, str]]
) -> list[dict[str, str]]:
    """The environment of each rank; a single process gets no RANK."""
    port = str(free_port())
    environments = []
    for rank in range(world_size):
        own = environment(env)
        if world_size > 1:
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            own |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments.append(own | rank_env.get(rank, {}))
    return environments


def start_ranks(
    argv: list[str],
    world_size: int,
    folder: Path,
    env: Mapping[str, str] = {},
    rank_env: Mapping[int, Mapping[str, str]] = {},
    program: tuple[str, ...] = ("-m", "muster.train"),
) -> list[subprocess.Popen[bytes]]:
    """Starts `python -m muster.train` for each rank, with its output in files in `folder`."""
    processes = []
    for rank, own in enumerate(rank_environments(world_size, env, rank_env)):
        with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
            command = [sys.executable, *program, *argv]
            processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=out, stderr=err))
    return processes


def wait_ranks(processes: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float = 450) -> list[Ended]:
    """Waits for the processes; returns their results. After `deadline_s` it kills all, and the test fails."""
    end = time.monotonic() + deadline_s
    try:
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return read_ranks([process.returncode for process in processes], folder)


def read_ranks(codes: list[int], folder: Path) -> list[Ended]:
    """The results of ranks: their exit `codes`, and their output from the files in `folder`."""
    texts = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(len(codes))]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def bare(ended: list[Ended]) -> list[str]:
    """The lines of all ranks' standard error, without the prefix of host and rank that all ranks but 0 have."""
    return [re.sub(r"^\[\S+ [1-9]\d*\] ", "", line) for rank in ended for line in rank.err.splitlines()]


Train = Callable[..., list[Ended]]


@pytest.fixture(scope="session")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The program that forks trainers."""
    env = environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    command = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate()


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, forks: subprocess.Popen[str]) -> Train:
    """Runs the trainer with `argv` in `world_size` processes; returns the result of each.

    Each process runs the code `before` first. With `shm`, options of a tmpfs, the processes share a private /dev/shm,
    for which the test must be root.
    """

    def run(
        argv: list[str],
        world_size: int = 1,
        *,
        deadline_s: float = 450,
        ok: bool = False,
        before: str = "",
        shm: str | None = None,
        env: Mapping[str, str] = {},
        rank_env: Mapping[int, Mapping[str, str]] = {},
    ) -> list[Ended]:
        assert forks.stdin is not None
        assert forks.stdout is not None
        folder = tmp_path_factory.mktemp("ranks")
        ranks = [
            {"argv": argv, "env": own, "folder": str(folder), "name": rank, "before": before}
            for rank, own in enumerate(rank_environments(world_size, env, rank_env))
        ]
        forks.stdin.write(json.dumps({"ranks": ranks, "deadline_s": deadline_s, "shm": shm}) + "\n")
        forks.stdin.flush()
        codes = json.loads(forks.stdout.readline())
        ended = read_ranks(codes, folder)
        said = "\n".join(rank.out + rank.err for rank in ended)
        assert None not in codes, f"not over after {deadline_s} s: {codes}\n{said}"
        if ok:
            assert codes == [0] * world_size, said
        return ended

    return run


@pytest.fixture(scope="session")
def ranks():
    """`start_ranks` and `wait_ranks`, for tests that act on the running processes."""
    return start_ranks, wait_ranks


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Options for short runs."""
    return list(SMALL)


@pytest.fixture(scope="session")
def summary_of() -> Callable[[Path], dict]:
    """Reads a run's summary."""
    return lambda run: json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="session")
def make_images() -> Callable[..., Path]:
    """Fills a folder with `per_class` JPEG files in each of `classes`: noise, brighter in each further class."""

    def make(root: Path, per_class: int = 12, classes: tuple[str, ...] = ("bird", "cat"), size: int = 40) -> Path:
        drawn = np.random.default_rng(0)
        for number, name in enumerate(classes):
            (root / name).mkdir(parents=True)
            for index in range(per_class):
                noise = drawn.integers(0, 120, (size, size, 3), dtype=np.uint8) + np.uint8(60 * number)
                Image.fromarray(noise).save(root / name / f"{index:03}.jpg")
        return root

    return make
