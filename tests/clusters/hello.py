"""A small script as users write it for torchrun: each rank prints where it is, and the sum over all ranks."""

from pathlib import Path

from tests.clusters.weights import MUSTER

# The ranks of a launch add up its number, 1 by default: four ranks print 4.0, whatever other launches run meanwhile.
SCRIPT = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(sys.argv[1] if sys.argv[1:] else 1)])
dist.all_reduce(total)
rank = f"{dist.get_rank()}/{os.environ['LOCAL_RANK']}"
# In one piece: the lines of four ranks go through one pipe.
line = f"sum {total.item()} {socket.gethostname()} {rank} {os.environ['GLOO_SOCKET_IFNAME']}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""

# After the host: rank/local rank.
FOUR = ["sum 4.0 node01 0/0 eth0", "sum 4.0 node01 1/1 eth0", "sum 4.0 node02 2/0 eth0", "sum 4.0 node02 3/1 eth0"]
"""The output of four ranks on two hosts."""


def hello(folder: Path, *options: str, number: int = 1) -> list[str]:
    """Writes the script into `folder`; returns the command that starts it, with options for `muster run`."""
    script = folder / "hello.py"
    script.write_text(SCRIPT)
    return [MUSTER, "run", *options, str(script), *([] if number == 1 else [str(number)])]


def said(output: str) -> list[str]:
    """The lines that the ranks printed, sorted."""
    return sorted(line for line in output.splitlines() if line.startswith("sum"))
