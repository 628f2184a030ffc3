"""What a person, or a program, sees of a plan."""

import json
import sys
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from train.plan import GIB, Estimate, Plan

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
        "more_gpus": plan.more_gpus,
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
    console.print(f"{machines.gpus} GPUs with {machines.memory:g} GiB, on {nodes} node{'s' if nodes > 1 else ''}")
    console.print()
    console.print("GiB on the GPU that holds the most", style="dim")
    console.print(table)
    console.print()
    for line in verdict(plan):
        console.print(line, soft_wrap=True, markup=False)


def verdict(plan: Plan) -> list[str]:
    """What to type, or what to turn."""
    options, choice = plan.subject.options, plan.choice
    memory = f"{plan.machines.memory:g} GiB"
    if choice is None:
        nearest = plan.nearest
        lines = [
            f"nothing fits into {memory}: nearest is {nearest.candidate.name} with {gib(nearest.need.total)}",
            "turn down: --seq-len" if plan.subject.shape is not None else "turn down: --image-size",
        ]
        more = f"or take more GPUs: fsdp fits on {plan.more_gpus}, with the smallest micro-batch"
        return [*lines, more if plan.more_gpus else "more GPUs alone don't help: activations are not divided by them"]
    fits = f"{choice.candidate.name}, {gib(choice.need.total)} of {memory}"
    lines = [f"the simplest that fits: {fits}"]
    if choice.candidate.options.batch_size < options.batch_size:
        lines = [
            f"nothing fits with --batch-size={options.batch_size}",
            f"the simplest that fits with smaller ones, and the same global batch: {fits}",
        ]
    if choice.need.host:
        per_node = choice.need.host * (plan.machines.gpus_per_node or 1)
        lines.append(f"each node holds {gib(per_node)} GiB of it in its own memory")
    return [*lines, "", f"  {choice.candidate.typed}"]


def gib(size: float) -> str:
    """`size` in GiB."""
    return f"{size / GIB:,.1f}" if size >= 0.05 * GIB or not size else f"{size / GIB:.2f}"
