"""What a profile's directives ask for: GPUs, and whether the user's number of them can be put in their place."""

import re
from collections.abc import Iterable, Mapping

from train.errors import MusterError

_NEVER = re.compile(r"(?!)")
# A list of other resources may stand around the GPUs, which may have a type: nvme:1,gpu:a100-80:4.
_GRES = (
    r"--gres[=\s]\s*(?:(?!(?:gres/)?gpu\b)[^\s,]+,)*(?:gres/)?gpu(?::(?![0-9]+(?![^\s,]))[\w.-]+)?"
    r"(?::[0-9]+)?(?=(?:,(?!(?:gres/)?gpu\b)[^\s,]+)*(?!\S))"
)
# A match has the number of GPUs a node at its end, or none.
_REWRITABLE: Mapping[str, re.Pattern[str]] = {
    "slurm": re.compile(rf"(?<!\S)(?:{_GRES}|--gpus-per-node[=\s]\s*(?:[A-Za-z][\w.-]*:)?[0-9]+(?!\S))"),
    "lsf": re.compile(r"""(?<!\S)-gpu\s+["']?(?:[^"'\s:]+:)*num=[0-9]+(?=[:"']|\s|$)"""),
    "flux": re.compile(r"(?<!\S)--gpus-per-node[=\s]\s*[0-9]+(?!\S)"),
}
_ASKS: Mapping[str, re.Pattern[str]] = {
    "slurm": re.compile(
        r"(?<!\S)(?:--(?:gres|tres-per-\w+)[=\s]\s*\S*\bgpu\b|--gpus(?:-per-\w+)?(?![\w-])|-G(?![A-Za-z]))"
    ),
    "pbs": re.compile(r"\bn?gpus="),
    "lsf": re.compile(r"(?<!\S)-gpu(?![\w-])|\bngpus"),
    "flux": re.compile(r"(?<!\S)(?:--gpus-per-\w+|-g)(?![A-Za-z-])"),
}


def mentions(directives: Iterable[str], *options: str) -> bool:
    """Whether one of `directives` has one of `options`, with a value or without."""
    return any(re.match(rf"{re.escape(option)}(?![\w-])", line) for line in directives for option in options)


def ask_for_gpus(scheduler: str, directives: Iterable[str]) -> bool:
    """Whether one of `directives` asks for GPUs: --gres=gpu:4 does, --gres=nvme:1600 does not."""
    return any(_ASKS.get(scheduler, _NEVER).search(line) for line in directives)


def with_gpus(scheduler: str, directives: Iterable[str], gpus: int | None) -> tuple[str, ...]:
    """The profile's directives, with the user's number of GPUs in those that ask for them.

    Raises:
        MusterError: one asks for them such that no number of GPUs a node can be put in.
    """
    return tuple(directives if gpus is None else (_with_gpus(scheduler, line, gpus) for line in directives))


def _with_gpus(scheduler: str, line: str, gpus: int) -> str:
    form = _REWRITABLE.get(scheduler, _NEVER)
    # What is left asks in another form, and would win over the user's number, or add to it.
    if ask_for_gpus(scheduler, [form.sub("", line)]):
        raise MusterError(
            "the profile asks for GPUs in a form that --gpus can't change",
            seen=f"--gpus={gpus}; launch.directives: {line}",
            fix="leave --gpus out; or nodes.gpus in the profile, in place of this directive",
        )
    return form.sub(lambda match: _numbered(match[0], gpus), line)


def _numbered(text: str, gpus: int) -> str:
    """`text` with another number at its end; --gres=gpu alone has none."""
    before = re.sub(r"(?<=[:=\s])[0-9]+$", "", text)
    return f"{before}{gpus}" if before != text else f"{text}:{gpus}"
