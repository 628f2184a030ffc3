"""The host's network libraries in the container: found below the host's root, proved to load, and put before NCCL.

find.py finds the host's fabric, devices and libraries. proof.py asks the dynamic loader which libraries are needed, and
whether they load; stage.py adds settings and devices, and links or binds the libraries. launch.py does all this at a
launch, commands.py for `muster fabric`.
"""

from dataclasses import dataclass
from pathlib import Path

AUTO, OFF, TCP = "auto", "off", "tcp"
"""Values of --fabric other than a fabric's name; TCP is also the profile of a host without a fabric."""

HOST_ROOT = Path("/host")
"""Where the host's root is mounted, read-only: `--bind /:/host:ro`, `-v /:/host:ro`."""
FABRIC_ROOT = Path("/opt/fabric/lib")
"""The folder into which the options that `muster fabric binds` prints bind the host's libraries, one by one."""


@dataclass(frozen=True)
class Need:
    """The properties of a launch that decide how its fabric is set up.

    Attributes:
        uses_nccl: whether the launch uses GPUs.
        wanted: a fabric's name, or auto.
        is_dry: whether this is a dry run, which creates nothing.
        is_proved: whether the libraries are loaded for a test before the start.
    """

    num_nodes: int
    uses_nccl: bool
    wanted: str = AUTO
    interface: str | None = None
    is_dry: bool = False
    is_proved: bool = True

    @property
    def spans_nodes(self) -> bool:
        """Whether NCCL has to communicate between nodes."""
        return self.num_nodes > 1 and self.uses_nccl

    @property
    def is_strict(self) -> bool:
        """Whether a fabric that can't be used is an error, and not only a note."""
        return self.spans_nodes or self.wanted != AUTO
