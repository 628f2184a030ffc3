"""The host's network libraries in the container: found below the host's root, proved to load, and put before NCCL.

host.py and libraries.py read the host, and find.py tells its fabric. closure.py asks the dynamic loader (loader.py)
what has to come along; stage.py adds settings and devices, and links or binds it. automatic.py does all that at a
launch, commands.py by hand.
"""

from pathlib import Path

AUTO, OFF, TCP = "auto", "off", "tcp"
"""What --fabric takes in the place of a fabric's name; TCP is the profile of a host without a fabric."""

HOST_ROOT = Path("/host")
"""Where the host's root is mounted, read-only: `--bind /:/host:ro`, `-v /:/host:ro`."""
FABRIC_ROOT = Path("/opt/fabric/lib")
"""Where the options that `muster fabric binds` prints put the host's libraries, one by one."""
