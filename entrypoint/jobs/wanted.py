"""What the user wants of a job."""

import re
from dataclasses import dataclass

from entrypoint.jobs import quoting, walltime
from train.errors import MusterError
from train.options import STRATEGIES

IMAGE = "muster.sif"
NAME = "muster"
COMMAND = ("train", "ddp")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A job, as it is asked for.

    Attributes:
        nodes: how many.
        time_s: its limit, in seconds.
        image: the SIF; the job can be given another by MUSTER_IMAGE.
        account: the project that pays; None leaves it to the submitting command.
        partition: Slurm's partition, or the queue of the others; None leaves it to the profile.
        gpus: of each node; None leaves it to the profile.
        name: the job's.
        command: what runs on each node, before the arguments that the job is given.
    """

    nodes: int = 2
    time_s: int = 3600
    image: str = IMAGE
    account: str | None = None
    partition: str | None = None
    gpus: int | None = None
    name: str = NAME
    command: tuple[str, ...] = COMMAND

    @property
    def is_training(self) -> bool:
        """Whether the command is a trainer of ours, which knows --name and --resume."""
        return len(self.command) > 1 and self.command[0] == "train" and self.command[1] in STRATEGIES

    @property
    def is_elastic(self) -> bool:
        """Whether the command is to go on without nodes that die: `--nnodes MIN:MAX`."""
        return re.search(r"(^|\0)--nnodes[=\0]\d+:\d+(\0|$)", "\0".join(self.command)) is not None


def wanted(
    *,
    nodes: int,
    time: str,
    image: str,
    account: str | None,
    partition: str | None,
    gpus: int | None,
    name: str,
    command: tuple[str, ...],
) -> Wanted:
    """The job that these options ask for.

    Raises:
        MusterError: one of them can't be.
    """
    for option, value in (("--account", account), ("--partition", partition), ("--name", name)):
        if value is not None:
            quoting.plain(value, option)
    # Some schedulers make a file's name of it, others refuse it.
    if "/" in name:
        raise MusterError("a job's name has no / in it", seen=f"--name={name}", fix=f"--name={name.replace('/', '-')}")
    quoting.text(image, "--image")
    for word in command:
        quoting.text(word, "COMMAND")
    if not image:
        raise MusterError("an image has a name", seen=f"--image={image}", fix="--image muster.sif")
    return Wanted(
        nodes=nodes,
        time_s=walltime.parse(time),
        image=image,
        account=account,
        partition=partition,
        gpus=gpus,
        name=name,
        command=command or COMMAND,
    )
