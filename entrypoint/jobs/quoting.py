"""Filters for the templates: nothing of a profile or of the user reaches a shell, or a directive, as it is."""

import re
import shlex
import textwrap
from collections.abc import Iterable

from muster.entrypoint.sites.recognise import VARIABLE
from muster.errors import MusterError, one_line

_PLAIN = re.compile(r"[A-Za-z0-9_.@%+,:=/-]+")


def word(value: object) -> str:
    r"""`value` as one word of bash, on one line, without control characters, and nothing in it expanded.

    A line of its own could begin with the `#$` or `#BSUB` of a directive: schedulers read the whole script for those.
    A terminal would obey what follows an ESC.

    >>> word("a\n#BSUB -q other")
    "$'a\\n#BSUB -q other'"
    """
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    escaped = re.sub(r"([\\'])", r"\\\1", text).replace("\n", r"\n").replace("\r", r"\r")
    return f"$'{''.join(map(_escaped, escaped))}'"


def _escaped(character: str) -> str:
    # Its bytes in UTF-8, or the byte that was none: bash writes \u by the locale.
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def words(values: Iterable[object]) -> str:
    """Each of `values` as one word of a shell."""
    return " ".join(word(value) for value in values)


def expanded(value: object) -> str:
    r"""`value` between double quotes, so that a shell expands $NAME and ${NAME} in it, and nothing else.

    >>> expanded('$SCRATCH/my "runs" $(id)')
    '"$SCRATCH/my \\"runs\\" \\$(id)"'
    """
    text = re.sub(r"^~(?=/|$)", "$HOME", str(value))
    # A match is a variable, or one character that would mean something between the quotes.
    escaped = re.sub(rf"({VARIABLE.pattern})|[\\\"`$]", lambda match: match[1] or f"\\{match[0]}", text)
    return f'"{escaped}"'


def needs(value: str) -> list[str]:
    """The variables that `expanded(value)` reads, each once."""
    text = re.sub(r"^~(?=/|$)", "$HOME", value)
    return list(dict.fromkeys(match[1] or match[2] for match in VARIABLE.finditer(text)))


def directive(value: object) -> str:
    """`value` as it is, for a line that the scheduler reads and no shell.

    Raises:
        MusterError: it would not stay on its line.
    """
    text = str(value)
    if not text or not text.isprintable():
        raise MusterError(
            "a directive is one line of printable characters",
            seen=one_line(text) or "nothing",
            fix="remove line breaks and control characters from it",
        )
    return text


def text(value: str, option: str) -> str:
    """`value`, which a user gave for `option`, for a file in UTF-8.

    Raises:
        MusterError: it is no text, as a file's name of another encoding is none.
    """
    if re.search("[\0\ud800-\udfff]", value):
        raise MusterError(f"{option} is no text in UTF-8", seen=f"{option}={value}", fix=f"{option} in UTF-8")
    return value


def plain(value: str, option: str) -> str:
    """`value`, which a user gave for `option`, for a place where nothing can be quoted.

    Raises:
        MusterError: it has blanks, quotes or other characters that a scheduler would stumble over.
    """
    if not _PLAIN.fullmatch(value) or value.startswith("-"):
        raise MusterError(
            f"{option} is one word of letters, digits and . _ @ % + , : = / -",
            seen=f"{option}={value}",
            fix=f"{option} with such a word",
        )
    return value


def comment(value: object) -> str:
    """`value` for a comment: on one line, whatever is in it."""
    return one_line(" ".join(str(value).split()))


def wrapped(value: object) -> list[str]:
    """`value` for several lines of a comment."""
    return textwrap.wrap(comment(value), 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
