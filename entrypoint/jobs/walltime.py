"""Time limits: as people write them, in seconds, and as each scheduler wants them."""

import re

from train.errors import MusterError

_CLOCK = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_UNITS = re.compile(r"(?:([0-9]{1,3})d)?(?:([0-9]{1,4})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")
_MOST_S = 366 * 24 * 3600


def parse(text: str) -> int:
    """The seconds that `text` stands for: 1:30:00, 2-12:00:00 or 1h30m.

    A number alone is minutes to Slurm and seconds to PBS, and 1:30 is minutes to one and hours to another: neither is
    taken.

    Raises:
        MusterError: it is none of these, or no time that a job could have.
    """
    match = _CLOCK.fullmatch(text.strip()) or _UNITS.fullmatch(text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 60 <= total <= _MOST_S:
        raise MusterError(
            "--time is a time limit of a minute or more, with its units",
            seen=f"--time={text}",
            fix="--time 1:30:00, --time 2-12:00:00 or --time 90m",
        )
    return total


def clock(seconds: int) -> str:
    """HH:MM:SS, the hours as many as there are: for PBS and Grid Engine, and for Slurm too."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def hours_and_minutes(seconds: int) -> str:
    """H:MM, rounded up: for LSF."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def warning(seconds: int) -> int:
    """How many seconds before the limit a job is warned: a tenth of it, and 5 minutes at most."""
    return min(300, seconds // 10)
