"""A line from every rank: its host, and the address and GPU that it would use.

    muster run examples/print_hostinfo.py

It reads the variables that the launcher sets, and needs no torch: `nvidia-smi` gives the GPU's name.
"""

import os
import socket
import subprocess


def address_towards(master: str) -> str:
    """The address from which this host reaches `master`; nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return probe.getsockname()[0]


def gpu(local_rank: int) -> str:
    """The name of this rank's GPU, as the driver reports it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except OSError:
        return "no GPU"
    return listed[local_rank].partition(" (UUID")[0] if local_rank < len(listed) else "no GPU"


def main() -> None:
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size, master = os.environ.get("WORLD_SIZE", "1"), os.environ.get("MASTER_ADDR", "127.0.0.1")
    line = (
        f"rank {rank} of {world_size} on {socket.gethostname()}, local rank {local_rank}, "
        f"address {address_towards(master)}, {gpu(local_rank)}\n"
    )
    # One write for the whole line: the ranks share a pipe, and parts of their lines would mix.
    os.write(1, line.encode())


if __name__ == "__main__":
    main()
