"""What a launch asks of the fabric, and where it is looked for."""

import os
from dataclasses import dataclass
from pathlib import Path

from entrypoint.fabric.model import FABRIC_ROOT, HOST_ROOT

AUTO, OFF, TCP = "auto", "off", "tcp"


@dataclass(frozen=True)
class Places:
    """Where things are looked for: the host's root, libraries that were bound, and this container's own root."""

    host: Path = HOST_ROOT
    bound: Path = FABRIC_ROOT / "lib"
    own: Path = Path("/")

    @property
    def interfaces(self) -> tuple[str, ...] | None:
        """This container's network interfaces, which need not be the host's; None where they are not told."""
        try:
            return tuple(sorted(os.listdir(self.own / "sys/class/net")))
        except OSError:
            return None


PLACES = Places()


@dataclass(frozen=True)
class Need:
    """What a launch asks of the fabric.

    Attributes:
        num_nodes: of the job.
        uses_nccl: whether there are GPUs to be used.
        wanted: a fabric's name, or auto.
        interface: the one that the user named.
        host_nccl: whether the host's NCCL is to be used.
        is_dry: whether nothing may be made.
        is_proved: whether the libraries are opened before the start.
    """

    num_nodes: int
    uses_nccl: bool
    wanted: str = AUTO
    interface: str | None = None
    host_nccl: bool = False
    is_dry: bool = False
    is_proved: bool = True

    @property
    def is_several(self) -> bool:
        """Whether NCCL has to cross from node to node."""
        return self.num_nodes > 1 and self.uses_nccl

    @property
    def is_strict(self) -> bool:
        """Whether what can't be had is an error."""
        return self.is_several or self.wanted != AUTO or self.host_nccl
