"""Recorded environments, as `muster detect --record` writes them and `--env-file` reads them.

    # source:  Slurm 22.05.8, srun -N2
    # host:    node02
    SLURM_JOB_ID=9
    --- file PBS_NODEFILE
    node01

The output of `env` is read too, with values of several lines and bash functions that environment modules export:

    BASH_FUNC_module%%=() {  eval $(/usr/bin/modulecmd bash $*)
    }
"""

import re
from contextlib import suppress
from pathlib import Path

from muster.entrypoint.detect import families
from muster.entrypoint.environment import NAME, Environment, container_engine
from muster.errors import MusterError, explaining

# Variables of users, torchrun and communication libraries, which are recorded beside those of the families.
_TAKEN = re.compile(
    r"(KUBERNETES|JOBSET|JOB|TORCHELASTIC|MUSTER|NCCL|GLOO|OMP|MASTER|LOCAL|GROUP|ROLE|CUDA|GPU|ROCR|APPTAINER"
    r"|SINGULARITY)(_\w+)?"
    r"|PMIX?|RANK|WORLD_SIZE|NODE_RANK|NQUEUES|QUEUE|ENVIRONMENT|HOSTNAME|TMPDIR"
)
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|COOKIE|CREDENTIAL|AUTH|JWT|_KEY|KEY_|APIKEY|PRECONDITION_TRANSPORTS|_PW", re.IGNORECASE
)
# A URL with a user or a password, what looks like a key (long and hexadecimal, a JWT, or a PEM block), and a command or
# a URL with one: --api-key 8f2c, ?token=8f2c, &sig=8f2c, HF_TOKEN=8f2c; tokens of Hugging Face, GitHub and GitLab.
# Matching from each letter of a long text would take hours.
SECRET_VALUE = re.compile(
    r"(?<=\w)://[^/\s]*@|----BEGIN|\b(?i:bearer)\s|(?<![\w-])(?=[\w-]++\.)[\w-]*\beyJ[\w-]{10,}\.|\b[0-9a-fA-F]{32,}+\b"
    r"|(?:[?&]|(?<![\w-])\w*-)(?i:[\w-]*(?:token|secret|password|passwd|key|auth|sig))[=\s]+[^\s-]"
    r"|(?:TOKEN|SECRET|PASSWORD|PASSWD|_KEY)=\S|\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{20}|github_pat_\w{20}|glpat-\w{16})"
)
# A function that bash exports: BASH_FUNC_module%%=() {  eval ..., up to a line with a brace alone.
_FUNCTION = re.compile(r"^BASH_FUNC_[^=\n]+(?:%%|\(\))=(?:.(?!^BASH_FUNC_))*?\n}$", re.MULTILINE | re.DOTALL)
MAX_FILE = 1_000_000
MAX_RECORDING_BYTES = 16 << 20


def load(path: Path) -> Environment:
    """The environment that the recording at `path` holds.

    Raises:
        MusterError: the file can't be read, or begins with a line that is neither a comment nor NAME=VALUE.
    """
    fix = "muster detect --env-file FILE, with a file of NAME=VALUE lines, as `env` prints them"
    with explaining("the recorded environment can't be read", seen=path, fix=fix), path.open("rb") as file:
        content = file.read(MAX_RECORDING_BYTES + 1)
        if len(content) > MAX_RECORDING_BYTES:
            raise OSError(f"larger than {MAX_RECORDING_BYTES} bytes")
    # As in the operating system's variables, any bytes may occur, and only a line feed ends a line.
    text = content.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    head, *sections = re.split("^--- file ", text, flags=re.MULTILINE)
    files: dict[str, str] = {}
    for section in sections:
        name, _, lines = section.partition("\n")
        files[name.strip()] = files.get(name.strip(), "") + lines
    values: dict[str, list[str]] = {}
    host: str | None = None
    continued = ""  # the variable that a line without NAME= belongs to
    for number, line in enumerate(_FUNCTION.sub("", head).split("\n")):
        name, equals, value = line.partition("=")
        if line.startswith("#"):
            if of_host := re.match(r"#\s*host\s*:(.*)", line):
                host = of_host[1].strip() or None
        elif not line.strip():
            continue
        elif equals and NAME.fullmatch(name):
            values[name], continued = [value], name
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
    return Environment(variables, host, files, engine=container_engine(variables, root=None))


def as_recording(env: Environment) -> str:
    """The recording of an environment, without its secrets: for a help desk, or for a new test."""
    lines = ["# source:  muster detect --record", f"# host:    {env.host or ''}"]
    read, prefixes = set(families.names("VARIABLES")), tuple(families.names("PREFIXES"))
    wanted = [name for name in sorted(env) if name in read or name.startswith(prefixes) or _TAKEN.fullmatch(name)]
    taken = [name for name in wanted if env[name].isprintable() and not is_secret(name, env[name])]
    if left_out := len(wanted) - len(taken):
        lines.append(f"# left out: {left_out} that may be secret, or are more than a line of text")
    lines += [f"{name}={env[name]}" for name in taken]
    for name, text in env.files.items():  # of an environment that was recorded, perhaps elsewhere
        lines += [f"--- file {name}", *text.encode(errors="replace").decode().splitlines()]
    for name in families.names("TEXT_FILES", "BINARY_FILES") if env.is_live else ():
        with suppress(OSError):  # there is none, or it can't be read
            content = Path(env.get(name, "")).read_bytes()[:MAX_FILE]
            readable = content.decode("utf-8", "replace").replace("\0", "").splitlines()
            lines += [f"--- file {name}", *(readable if name in families.names("TEXT_FILES") else [content.hex()])]
    return "\n".join(lines) + "\n"


def is_secret(name: str, value: str) -> bool:
    """Whether the variable may be one that nobody else should see."""
    return bool(SECRET_NAME.search(name) or SECRET_VALUE.search(value))


def save(env: Environment, path: Path) -> None:
    """Writes the recording of `env` to a new file at `path`.

    Raises:
        MusterError: there is such a file already, or it can't be written.
    """
    fix = "--record NEW_FILE, where you may write"
    with explaining("the recording can't be written", seen=path, fix=fix), path.open("x", encoding="utf-8") as file:
        file.write(as_recording(env))
