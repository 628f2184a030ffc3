"""Quoting of values for shells, directives and comments: no text of a profile or of the user is written unchecked."""

import re
import textwrap

from muster.entrypoint import show
from muster.entrypoint.sites.recognise import VARIABLE
from muster.errors import MusterError, one_line


def expanded(value: object) -> str:
    r"""`value` between double quotes, so that a shell expands $NAME and ${NAME} in it, and nothing else.

    >>> expanded('$SCRATCH/my "runs" $(id)')
    '"$SCRATCH/my \\"runs\\" \\$(id)"'
    """
    # A match is a variable, or one character that is special between double quotes.
    escaped = re.sub(rf"({VARIABLE.pattern})|[\\\"`$]", lambda match: match[1] or f"\\{match[0]}", str(value))
    return f'"{escaped}"'


def fallback(value: object) -> str:
    r"""`value` escaped for the double quotes of "${NAME:-value}", so that nothing in it is expanded.

    >>> fallback('a $(id) {"b"}')
    'a \\$(id) {\\"b\\"\\}'

    Raises:
        MusterError: it is empty, or has line breaks or control characters.
    """
    text = directive(value)
    if re.search("['<>]", text):  # there bash 5.2 looks for a second ', and for the ) of a <( or >(
        return f"$(printf %s {show.word(text)})"
    return re.sub(r"[\\\"`$}]", r"\\\g<0>", text)


def variables_in(value: str) -> list[str]:
    """The variables that `expanded(value)` reads, each once."""
    return list(dict.fromkeys(match[1] or match[2] for match in VARIABLE.finditer(value)))


def directive(value: object) -> str:
    """`value` as it is, checked for a line that the scheduler reads and no shell.

    Raises:
        MusterError: it is empty, or has line breaks or control characters.
    """
    text = str(value)
    if not text or not text.isprintable():
        fix = "remove line breaks and control characters from it"
        raise MusterError("a directive is one line of printable characters", seen=one_line(text) or "nothing", fix=fix)
    return text


def check_plain(value: str, option: str) -> None:
    """Checks that `value`, which a user gave for `option`, can be written where nothing can be quoted.

    Raises:
        MusterError: it has blanks, quotes or other characters that a scheduler would misread.
    """
    # Some schedulers make a file's name of a job's name, others refuse a / in it.
    signs = ". _ @ % + , : = -" if option == "--name" else ". _ @ % + , : = / -"
    if not re.fullmatch(f"[A-Za-z0-9{signs.replace(' ', '')}]+", value) or value.startswith("-"):
        wrong = f"{option} is one word of letters, digits and {signs}"
        raise MusterError(wrong, seen=f"{option}={value}", fix=f"{option} with such a word")


def comment(value: object) -> str:
    """`value` for a comment: on one line, whatever is in it."""
    return one_line(" ".join(str(value).split()))


def wrapped(value: object) -> list[str]:
    """`value` for a comment, wrapped to several lines."""
    return textwrap.wrap(comment(value), 116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
