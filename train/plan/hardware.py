"""The machines that `train plan` plans for, as options. Without torch."""

from dataclasses import dataclass
from typing import Annotated

from train.inputs import option

MACHINES = "Machines"

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """How many GPUs there are, and how large; what is None is that of this machine."""

    gpus: Annotated[int | None, option(help="GPUs in all. Default: those of this machine.", panel=MACHINES, min=1)] = (
        None
    )
    memory: Annotated[
        float | None, option(help="GiB of memory a GPU. Default: that of this machine's.", panel=MACHINES, min=0.5)
    ] = None
    gpus_per_node: Annotated[
        int | None, option(help="Of them, on one node. Default: all, at most 8.", panel=MACHINES, min=1)
    ] = None
    json: Annotated[bool, option("--json", help="Print an object for programs.", panel=MACHINES)] = False
