"""The table at the end of a run: what was learnt, how fast, what held it up, and where its files are."""

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

WIDTH = 80
LONGEST = 5
"""How many operations of a trace are shown."""

STRAGGLES = 1.05
"""A rank that is busy this many times as long as the one in the middle is named."""


def table(summary: dict[str, Any], unit: str) -> Table:
    """The table of `summary`, of which any fact may be missing.

    Args:
        unit: images or tokens.
    """
    device = "GPU" if summary["device"].startswith("cuda") else "process"
    shown = Table(box=box.ROUNDED, show_header=False, width=WIDTH, padding=(0, 1))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(ratio=1, overflow="fold")
    learnt(shown, summary)
    shown.add_section()
    speed(shown, summary, unit, device)
    shown.add_section()
    costs(shown, summary, unit, device)
    shown.add_section()
    if summary.get("profile"):
        traced(shown, summary)
        shown.add_section()
    shown.add_row("steps in all", f"{summary['step']:,}, this run took {duration(summary['seconds'])}")
    if summary["bad_samples"]:
        shown.add_row("samples not readable", f"[yellow]{len(summary['bad_samples'])}[/yellow], see summary.json")
    shown.add_row("files", escape(summary["folder"]))
    return shown


def learnt(shown: Table, summary: dict[str, Any]) -> None:
    """Accuracy and loss."""
    final, best = summary["final_accuracy"], summary["best_accuracy"]
    shown.add_row("validation accuracy", f"[bold green]{final:.2%}[/bold green] at the end, {best:.2%} at best")
    losses = f"{summary['final_train_loss']:.4f} training, {summary['final_valid_loss']:.4f} validation"
    shown.add_row("loss", losses)


def speed(shown: Table, summary: dict[str, Any], unit: str, device: str) -> None:
    """Rates, times of steps, and what they went to."""
    step, number = summary["step_time_s"], summary["world_size"]
    each = f"  ({summary[f'{unit}_per_second_per_rank']:,.1f} a {device}, {number} of them)" if number > 1 else ""
    shown.add_row(f"{unit} per second", f"[bold]{summary[f'{unit}_per_second']:,.1f}[/bold]{each}")
    times = [f"{milliseconds(step[key])} {name}" for key, name in (("p50", "median"), ("p95", "p95"), ("p99", "p99"))]
    shown.add_row("time of a step", ", ".join(times))
    shown.add_row("first step", f"{summary['first_step_s']:.2f} s")
    if (shares := summary.get("shares")) is not None:
        shown.add_row("of a step", parts(shares, alone=number == 1))
    if summary.get("bubble_share") is not None:
        ideal = f"{summary['ideal_bubble_share']:.1%} where all stages take as long"
        shown.add_row("waiting for stages", f"{summary['bubble_share']:.1%} of the time; {ideal}")
    slowest = summary.get("slowest_rank")
    if slowest is not None and slowest["ratio"] > STRAGGLES:
        busy = f"busy {milliseconds(slowest['seconds'])} a step, the median {milliseconds(slowest['median_s'])}"
        shown.add_row("slowest rank", f"[yellow]{slowest['rank']} on {escape(slowest['host'])}[/yellow], {busy}")


def parts(shares: dict[str, Any], *, alone: bool) -> str:
    """What a step goes to, in words."""
    data, compute, communication = (shares[name] for name in ("data", "compute", "communication"))
    if communication is None:
        return f"{percent(compute)} computing and communicating, {percent(data)} for data"
    if alone:
        return f"{percent(compute)} computing, {percent(data)} waiting for data"
    return f"{percent(compute)} computing, {percent(communication)} waiting for ranks, {percent(data)} for data"


def costs(shown: Table, summary: dict[str, Any], unit: str, device: str) -> None:
    """Memory, operations and energy."""
    each = f" a {device}" + (" at most" if summary["world_size"] > 1 else "")
    shown.add_row("peak memory", f"{summary['peak_memory_gib']:.2f} GiB{each}")
    done = summary.get("flops_per_second_per_rank")
    if done is not None:
        peak = summary.get("peak_flops_per_second")
        share = f"MFU: unknown {'card' if device == 'GPU' else 'for CPUs'}"
        if peak is not None and summary.get("mfu") is not None:
            share = f"[bold]{summary['mfu']:.1%}[/bold] of {amount(peak)}FLOP/s (MFU)"
        shown.add_row("operations", f"{amount(done)}FLOP/s a {device}; {share}")
    if summary.get("energy_j") is not None:
        one = unit.removesuffix("s")
        per = summary.get(f"energy_j_per_{one}")
        each = "" if per is None else f", {amount(per)}J a{'n' if one[0] in 'aeiou' else ''} {one}"
        shown.add_row("energy", f"{amount(summary['energy_j'])}J{each}")


def traced(shown: Table, summary: dict[str, Any]) -> None:
    """Where the trace is, and what it says."""
    number = summary["profile_steps"]
    steps = f"{number} step{'s' if number > 1 else ''} of rank 0"
    shown.add_row("trace", f"{escape(summary['profile'])} below the run's folder,\n{steps}; ui.perfetto.dev opens it")
    if (shares := summary["profile_shares"]) is not None:
        words = [f"{percent(shares['compute'])} computing"]
        if shares["communication"] or shares["hidden"]:
            words.append(f"{percent(shares['communication'])} communicating ({percent(shares['hidden'])} more hidden)")
        shown.add_row("in it", ", ".join(words))
    lines = [
        f"{milliseconds(operation['seconds'] / number):>9}  {shortened(operation['name'], 43)}"
        for operation in summary["profile_operations"][:LONGEST]
    ]
    if lines:
        shown.add_row("longest in a step", escape("\n".join(lines)))


def shortened(name: str, most: int) -> str:
    """`name` in at most so many characters, by what stands in its middle: the end tells forth from back."""
    return name if len(name) <= most else f"{name[: most - 17]}…{name[-16:]}"


def percent(share: float) -> str:
    """`share` with as many digits as say something."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def milliseconds(seconds: float) -> str:
    """`seconds` in the unit that reads well."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def duration(seconds: float) -> str:
    """`seconds` as a person says it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def amount(value: float) -> str:
    """`value` with the prefix of its unit, which follows: 12.3 G."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value * 1e6:.3g} µ"
