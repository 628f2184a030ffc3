"""Writing the environment of a process down, without its secrets, for a help desk to read or a test to be made of.

Only variables of schedulers, launchers and communication libraries are taken, and of these none that may be a secret.
"""

import re
from pathlib import Path

from muster.entrypoint.environment import Environment
from muster.errors import MusterError

TAKEN = re.compile(
    r"(SLURMD?|SBATCH|PBS|PMIX?|PALS|OMPI|MPI|HYDRA|HYDI|I_MPI|MV2|MPIEXEC|LSB|LSF|JSM|SGE|PE|FLUX|KUBERNETES|PET|VC|VK"
    r"|JOBSET|JOB|TORCHELASTIC|MUSTER|NCCL|GLOO|OMP|MASTER|LOCAL|GROUP|ROLE|CUDA|GPU|ROCR|APPTAINER|SINGULARITY)(_\w+)?"
    r"|RANK|WORLD_SIZE|NODE_RANK|NSLOTS|NHOSTS|NQUEUES|QUEUE|ENVIRONMENT|HOSTNAME|TMPDIR"
)
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|COOKIE|CREDENTIAL|AUTH|JWT|_KEY|KEY_|PRECONDITION_TRANSPORTS|_PW", re.IGNORECASE
)
# user:password@host, and what looks like a key: a long word of mixed characters, or a PEM block.
SECRET_VALUE = re.compile(r"\w+://[^/\s]*:[^/\s]*@|-----BEGIN|\beyJ[\w-]{10,}\.|\b[0-9a-fA-F]{32,}\b")
# The files that detection reads, by the variable that names them.
TEXT_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")
# Written as hexadecimal digits.
BINARY_FILES = ("PALS_APINFO",)
MAX_FILE = 1_000_000


def text(env: Environment) -> str:
    """The recording of a live environment, in the format that `--env-file` reads."""
    lines = ["# source:  muster detect --record", f"# host:    {env.host or ''}"]
    taken: list[str] = []
    left_out = 0
    for name, value in sorted(env.items()):
        if not TAKEN.fullmatch(name):
            continue
        if is_secret(name, value) or "\n" in value:
            left_out += 1
        else:
            taken.append(f"{name}={value}")
    if left_out:
        lines.append(f"# left out: {left_out} that may be secret, or are longer than a line")
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


def write(env: Environment, path: Path) -> None:
    """Writes the recording of `env` to a new file at `path`.

    Raises:
        MusterError: there is such a file already, or it can't be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text(env))
    except FileExistsError:
        raise MusterError("there is a file of that name", seen=str(path), fix="--record OTHER_FILE") from None
    except OSError as reason:
        raise MusterError(
            f"the recording can't be written: {reason.strerror}",
            seen=str(path),
            fix="--record FILE, where you may write",
        ) from None


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()[:MAX_FILE] if path else None
    except OSError:
        return None
