"""The result of detection, as text: for a person, for a program, for a shell."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import NAME
from muster.entrypoint.launch.frameworks import bracketed
from muster.entrypoint.launch.program import Launch
from muster.entrypoint.rendezvous.address import Rendezvous
from muster.errors import one_line
from muster.units import plural

if TYPE_CHECKING:
    from muster.entrypoint.launch.start import Context

FIELDS = (
    "scheduler", "launcher", "job_id", "attempt", "hosts", "num_nodes", "node_rank", "local_rank", "tasks_on_node",
    "nproc_per_node", "mode", "master_addr", "master_port", "rdzv_id", "interface",
)  # fmt: skip

MAX_CELL_TEXT = 400


def _found(context: "Context") -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each of FIELDS; and, for each that has one, the variable or option it came from."""
    allocation, rendezvous = context.allocation, context.rendezvous
    values = {name: getattr(rendezvous if hasattr(rendezvous, name) else allocation, name) for name in FIELDS}
    return values, {name: text for name, text in {**allocation.sources, **rendezvous.sources}.items() if name in FIELDS}


def as_json(context: "Context", launch: Launch) -> str:
    """One JSON object: FIELDS, `sources`, `argv`, `env` (the variables that are set) and `site` (null without one)."""
    values, sources = _found(context)
    site = context.site
    answer = values | {
        "sources": sources,
        "argv": list(launch.argv),
        "env": dict(launch.additions.variables),
        "site": site and {"name": site.name, "title": site.site.title, "status": site.site.status, "why": site.why},
    }
    # JSON escapes all control characters but this one.
    return json.dumps(answer, indent=2).replace("\x7f", r"\u007f")


def as_table(context: "Context", launch: Launch) -> str:
    """A table of values and their sources, the notes, and the command."""
    # Loading rich takes half of this program's start-up time, and only this command needs it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, style in (("", "bold"), ("found", ""), ("from", "dim")):
        drawn.add_column(heading, style=style, overflow="fold")
    values, sources = _found(context)
    for name, value in values.items():
        drawn.add_row(Text(name.replace("_", " ")), Text(_brief(value)), Text(_short(sources.get(name, ""))))
    if context.site:
        drawn.add_row(Text("site"), Text(context.site.site.title), Text(context.site.why))
    with console.capture() as capture:
        console.print(drawn)
        for line in context.allocation.rejected:
            console.print(Text(f"not used: {one_line(line)}", style="dim"))
        for note in launch.additions.notes:
            console.print(Text(f"note: {one_line(note)}"))
        console.print(Text("would run:", style="bold"))
    return capture.get() + script(launch)


def _brief(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        items = [str(item) for item in cast("tuple[object, ...]", value)]
        return _short(" ".join([*items[:4], f"... ({len(items)})"] if len(items) > 4 else items)) or "-"
    return _short(str(value))


def _short(text: str) -> str:
    # A list of hosts may have 100,000 characters: drawing them as a table takes seconds, and shows nothing.
    return one_line(text if len(text) <= MAX_CELL_TEXT else f"{text[:MAX_CELL_TEXT]}...")


def script(launch: Launch) -> str:
    """Lines for a shell that start the process of `launch`."""
    lines = [f"unset {name}" for name in launch.additions.removed if NAME.fullmatch(name)]
    return "\n".join([*lines, exports(launch.additions.variables), words(launch.argv)])


def exports(variables: Mapping[str, str]) -> str:
    """Lines for a shell that set `variables`."""
    return "\n".join(f"export {name}={word(value)}" for name, value in sorted(variables.items()))


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
    # Its bytes in UTF-8, or the one that could not be decoded: bash would write \u in the locale's encoding.
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def words(values: Iterable[object]) -> str:
    """Each of `values` as one word of a shell."""
    return " ".join(word(value) for value in values)


def headline(allocation: Allocation, rendezvous: Rendezvous, launch: Launch) -> str:
    """One line on the world that is about to start, and one for each note."""
    job = f"{allocation.scheduler} job {allocation.job_id}" if allocation.job_id else allocation.scheduler
    if allocation.launcher != allocation.scheduler:
        job += f", {allocation.launcher}"
    ranks = sorted(set(allocation.ranks_per_node))
    shape = f"{plural(allocation.num_nodes, 'node')} x {'-'.join(map(str, ranks))}"
    place = f"{bracketed(rendezvous.address)}:{rendezvous.master_port}" if rendezvous.master_port else "this host"
    line = f"muster: {job}: {shape} = {plural(allocation.world_size, 'rank')}, meeting on {place}"
    if rendezvous.interface:
        line += f" over {rendezvous.interface}"
    return "\n".join(map(one_line, [line, *(f"muster: {note}" for note in launch.additions.notes)]))
