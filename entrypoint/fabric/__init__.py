"""The host's network libraries in the container: found below the host's root, proved to load, and put before NCCL.

find.py tells the host's fabric, devices and libraries. proof.py asks the dynamic loader what has to come along, and
whether it opens; stage.py adds settings and devices, and links or binds it. launch.py does all that at a launch,
commands.py by hand.
"""

from dataclasses import dataclass
from pathlib import Path

AUTO, OFF, TCP = "auto", "off", "tcp"
"""What --fabric takes in the place of a fabric's name; TCP is the profile of a host without a fabric."""

HOST_ROOT = Path("/host")
"""Where the host's root is mounted, read-only: `--bind /:/host:ro`, `-v /:/host:ro`."""
FABRIC_ROOT = Path("/opt/fabric/lib")
"""Where the options that `muster fabric binds` prints put the host's libraries, one by one."""


@dataclass(frozen=True)
class Need:
    """What a launch asks of the fabric.

    Attributes:
        uses_nccl: whether there are GPUs to be used.
        wanted: a fabric's name, or auto.
        is_dry: whether nothing may be made.
        is_proved: whether the libraries are opened before the start.
    """

    num_nodes: int
    uses_nccl: bool
    wanted: str = AUTO
    interface: str | None = None
    is_dry: bool = False
    is_proved: bool = True

    @property
    def is_several(self) -> bool:
        """Whether NCCL has to cross from node to node."""
        return self.num_nodes > 1 and self.uses_nccl

    @property
    def is_strict(self) -> bool:
        """Whether what can't be had is an error."""
        return self.is_several or self.wanted != AUTO
