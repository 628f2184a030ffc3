"""What a process sees of its job: its variables, its host's name, the files that variables name.

Detectors read this and nothing else, so a recorded environment and the live one go through the same code.

A recording, as `muster detect --record` writes it and `--env-file` reads it:

    # source:  Slurm 22.05.8, srun -N2
    # host:    node02
    SLURM_JOB_ID=9
    --- file PBS_NODEFILE
    node01

What `env` prints is read too, with values of several lines and the functions of bash that environment modules export:

    BASH_FUNC_module%%=() {  eval $(/usr/bin/modulecmd bash $*)
    }
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.entrypoint import container
from muster.errors import MusterError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that a shell takes for variables: no other is read from a file, or printed for a shell."""

# Of schedulers, launchers and communication libraries: what is recorded.
TAKEN = re.compile(
    r"(SLURMD?|SBATCH|PBS|PMIX?|PALS|OMPI|MPI|HYDRA|HYDI|I_MPI|MV2|MPIEXEC|LSB|LSF|JSM|SGE|PE|FLUX|KUBERNETES|PET|VC|VK"
    r"|JOBSET|JOB|TORCHELASTIC|MUSTER|NCCL|GLOO|OMP|MASTER|LOCAL|GROUP|ROLE|CUDA|GPU|ROCR|APPTAINER|SINGULARITY)(_\w+)?"
    r"|RANK|WORLD_SIZE|NODE_RANK|NSLOTS|NHOSTS|NQUEUES|QUEUE|ENVIRONMENT|HOSTNAME|TMPDIR"
)
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|COOKIE|CREDENTIAL|AUTH|JWT|_KEY|KEY_|PRECONDITION_TRANSPORTS|_PW", re.IGNORECASE
)
# user:password@host, what looks like a key (a long word of mixed characters, or a PEM block), and a command with one:
# MUSTER_ARGS='--api-key 8f2c'
SECRET_VALUE = re.compile(
    r"\w+://[^/\s]*:[^/\s]*@|-----BEGIN|\beyJ[\w-]{10,}\.|\b[0-9a-fA-F]{32,}\b"
    r"|-(?i:[\w-]*(?:token|secret|password|key))[=\s]+[^\s-]"
)
# The files that detection reads, by the variable that names them.
TEXT_FILES = ("PBS_NODEFILE", "PE_HOSTFILE")
# Written as hexadecimal digits.
BINARY_FILES = ("PALS_APINFO",)
MAX_FILE = 1_000_000
MAX_RECORDING_BYTES = 16 << 20


@dataclass(frozen=True)
class Environment(Mapping[str, str]):
    """The variables of one process, as a mapping, and the host it runs on.

    Attributes:
        variables: name to value.
        host: the host's own name (`socket.gethostname()`), or None where a recording does not tell. `$HOSTNAME` is
            no substitute: srun hands the submitting host's on to every task.
        files: for a recording, the content of the files that variables name, by variable.
        is_live: whether this is the running process: only then may devices, addresses and cores be looked at.
        engine: that of the container which the process is in, as far as it is known.
    """

    variables: Mapping[str, str]
    host: str | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    is_live: bool = False
    engine: str | None = None

    def __getitem__(self, name: str) -> str:
        return self.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)


def live() -> Environment:
    """The environment of this process."""
    variables = dict(os.environ)
    return Environment(variables, socket.gethostname(), is_live=True, engine=container.engine(variables))


def load(path: Path) -> Environment:
    """The environment that the recording at `path` holds.

    Raises:
        MusterError: the file can't be read, or begins with what is neither a comment nor NAME=VALUE.
    """
    fix = "muster detect --env-file FILE, with a file of NAME=VALUE lines, as `env` prints them"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECORDING_BYTES + 1)
        if len(content) > MAX_RECORDING_BYTES:
            raise OSError(f"larger than {MAX_RECORDING_BYTES} bytes")
    except OSError as reason:
        raise MusterError("the recorded environment can't be read", seen=f"{path}: {reason}", fix=fix) from None
    values: dict[str, list[str]] = {}
    files: dict[str, list[str]] = {}
    host: str | None = None
    lines: list[str] | None = None
    # As the operating system has variables: any bytes, and lines end by nothing but a line feed.
    text = content.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    last_brace = max((number for number, line in enumerate(text) if line.rstrip("\r") == "}"), default=-1)
    in_function = False
    continued = ""  # the variable that a line without NAME= belongs to
    for number, line in enumerate(line.removesuffix("\r") for line in text):
        if in_function:
            in_function = line != "}"
            continue
        if line.startswith("--- file "):
            lines = files.setdefault(line.removeprefix("--- file ").strip(), [])
        elif lines is not None:
            lines.append(line)
        elif line.startswith("#"):
            key, _, value = line[1:].partition(":")
            if key.strip() == "host":
                host = value.strip() or None
        elif line.strip():
            name, equals, value = line.partition("=")
            if equals and NAME.fullmatch(name):
                values[name], continued = [value], name
            elif line.startswith("BASH_FUNC_"):
                in_function, continued = number < last_brace, ""
            elif equals and name and not re.search(r"\s", name):
                continued = ""  # a variable that no shell has, such as a.b=1
            elif continued:
                values[continued].append(line)
            elif not values:
                raise MusterError(
                    "a recorded environment begins with a line that is no NAME=VALUE",
                    seen=f"{path}, line {number + 1}: {line[:80]}",
                    fix=fix,
                )
    variables = {name: "\n".join(value) for name, value in values.items()}
    contents = {name: "".join(f"{line}\n" for line in content) for name, content in files.items()}
    return Environment(variables, host, contents, engine=container.engine(variables, root=None))


def as_recording(env: Environment) -> str:
    """The recording of a live environment, without its secrets: for a help desk to read, or a test to be made of."""
    lines = ["# source:  muster detect --record", f"# host:    {env.host or ''}"]
    taken: list[str] = []
    left_out = 0
    for name, value in sorted(env.items()):
        if not TAKEN.fullmatch(name):
            continue
        if is_secret(name, value) or not value.isprintable():
            left_out += 1
        else:
            taken.append(f"{name}={value}")
    if left_out:
        lines.append(f"# left out: {left_out} that may be secret, or are more than a line of text")
    lines += taken
    for name in (*TEXT_FILES, *BINARY_FILES):
        content = _content(env.get(name, ""))
        if content is None:
            continue
        readable = content.decode("utf-8", "replace").replace("\0", "").splitlines()
        lines += [f"--- file {name}", *(readable if name in TEXT_FILES else [content.hex()])]
    return "\n".join(lines) + "\n"


def is_secret(name: str, value: str) -> bool:
    """Whether the variable may be one that nobody else should see."""
    return bool(SECRET_NAME.search(name) or SECRET_VALUE.search(value))


def save(env: Environment, path: Path) -> None:
    """Writes the recording of `env` to a new file at `path`.

    Raises:
        MusterError: there is such a file already, or it can't be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(as_recording(env))
    except OSError as reason:
        wrong = f"the recording can't be written: {reason.strerror}"
        raise MusterError(wrong, seen=str(path), fix="--record NEW_FILE, where you may write") from None


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()[:MAX_FILE] if path else None
    except OSError:
        return None
