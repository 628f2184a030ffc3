"""What a person, or a program, sees of a plan."""

import json
import sys
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from train.plan.hardware import GIB
from train.plan.planner import Estimate, Plan

WIDTH = 96
PARTS = ("weights", "gradients", "moments", "activations", "working", "allowance")


def as_json(plan: Plan) -> str:
    """The plan as an object; sizes in GiB a GPU."""
    found = {
        "model": plan.subject.options.model,
        "num_parameters": plan.subject.num_weights,
        "gpus": plan.machines.gpus,
        "gpus_per_node": plan.machines.gpus_per_node,
        "memory_gib": plan.machines.memory,
        "bf16": plan.subject.bf16,
        "strategies": [as_record(plan, row) for row in plan.rows],
        "choice": None if plan.choice is None else as_record(plan, plan.choice),
        "nearest": None if plan.nearest is None else as_record(plan, plan.nearest),
        "more_gpus": plan.more_gpus,
        "seq_len": plan.seq_len,
    }
    return json.dumps(found, indent=2)


def as_record(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """One estimate, for programs."""
    sizes = {part: round(getattr(estimate.need, part) / GIB, 3) for part in (*PARTS, "total", "host")}
    candidate = estimate.candidate
    options = candidate.options
    return {
        "strategy": candidate.strategy,
        "name": candidate.name,
        "command": candidate.typed,
        "batch_size": options.batch_size,
        "accumulate": options.accumulate,
        "gib": sizes,
        "fits": estimate.fits(plan.memory),
    }


def show(plan: Plan) -> None:
    """Prints the plan as a table, and below it what to type."""
    subject, machines = plan.subject, plan.machines
    options = subject.options
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else WIDTH)
    unit = "tokens" if subject.shape is not None else "pixels a side"
    table = Table(box=ROUNDED, width=min(WIDTH, console.width), padding=(0, 1))
    table.add_column("", no_wrap=True, ratio=1)
    for name in ("weights", "grads", "moments", "activ.", "working", "allow.", "sum", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        is_chosen = plan.choice is not None and row.candidate == plan.choice.candidate
        fits = row.fits(plan.memory)
        mark = "[bold green]fits[/bold green]" if is_chosen else "[green]fits[/green]" if fits else "[dim]no[/dim]"
        sizes = [gib(getattr(row.need, part)) for part in PARTS]
        name = f"[bold]{row.candidate.name}[/bold]" if is_chosen else row.candidate.name
        table.add_row(name, *sizes, f"[bold]{gib(row.need.total)}[/bold]", mark)
    precision = "bf16" if subject.bf16 else "fp32"
    console.print(f"[bold]{options.model}[/bold], {subject.num_weights / 1e6:,.1f} M parameters, {options.optimizer}")
    console.print(f"{options.batch_size} a micro-batch, {subject.size} {unit}, computed in {precision}")
    nodes = -(-(machines.gpus or 1) // (machines.gpus_per_node or 1))
    gpus = f"{machines.gpus} GPU{'s' if machines.gpus != 1 else ''}"
    console.print(f"{gpus} with {machines.memory:g} GiB, on {nodes} node{'s' if nodes > 1 else ''}")
    console.print()
    console.print("GiB on the GPU that holds the most", style="dim")
    console.print(table)
    console.print()
    for line in verdict(plan):
        console.print(line, soft_wrap=True, markup=False)


def verdict(plan: Plan) -> list[str]:
    """What to type, or what to turn."""
    asked, choice = plan.subject.options, plan.choice
    if choice is None:
        return refusal(plan)
    options = choice.candidate.options
    lines = [
        f"the simplest that fits: {choice.candidate.name}, {gib(choice.need.total)} of {plan.machines.memory:g} GiB"
    ]
    if options.batch_size < asked.batch_size:
        same = options.batch_size * options.accumulate == asked.batch_size * asked.accumulate
        lines.insert(0, f"on the GPUs alone nothing fits with --batch-size={asked.batch_size}")
        lines[1] += f", with --batch-size={options.batch_size}" + ("" if same else ", so the global batch is smaller")
    if choice.need.host:
        per_node = choice.need.host * (plan.machines.gpus_per_node or 1)
        lines.append(f"each node holds {gib(per_node)} GiB of weights and moments in its own memory")
    return [*lines, "", f"  {choice.candidate.typed}"]


def refusal(plan: Plan) -> list[str]:
    """What to turn where nothing fits."""
    assert plan.nearest is not None
    candidate = plan.nearest.candidate
    needs = (
        f"{candidate.name} with --batch-size={candidate.options.batch_size} needs {gib(plan.nearest.need.total)} GiB"
    )
    lines = [f"nothing fits into {plan.machines.memory:g} GiB; the nearest, {needs}"]
    if plan.seq_len is not None:
        lines.append(f"it fits with --seq-len={plan.seq_len}")
    if plan.more_gpus is not None:
        lines.append(f"it fits, by fsdp, on {plan.more_gpus} GPUs")
    else:
        lines.append("more GPUs alone do not help: what one micro-batch holds is not divided by them")
    return [*lines, "", f"  {candidate.typed}"]


def gib(size: float) -> str:
    """`size` in GiB."""
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.2f}"
