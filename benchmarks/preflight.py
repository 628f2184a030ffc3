"""The time that `muster doctor` takes, by the number of nodes: fake hosts on this machine, a rank on each.

    python benchmarks/preflight.py [--nodes 8,64] [--rounds 3] [--record]

It needs root, for network namespaces, and 0.3 GB of memory per node. The time starts when all ranks have joined, as in
a training with --preflight; loading torch so many times on a few cores is not counted. All nodes share these cores:
where each node has cores of its own, the checks can only be faster.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from results import ROOT, parser, publish, spread, table

sys.path.insert(0, str(ROOT))

from tests.clusters.hosts import Hosts

WANTED_S, WANTED_NODES = 10.0, 64
PORT = 61000


def look(hosts: Hosts, *options: str) -> float:
    """The seconds of one `muster doctor` on all hosts.

    Raises:
        RuntimeError: a rank failed, or a fault was found.
    """
    names = list(hosts.addresses)
    argv = [sys.executable, "-P", "-m", "muster.check", "doctor", "--json", "--device=cpu", "--timeout-s=300", *options]
    place = {"MASTER_ADDR": names[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1"}
    place |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        hosts.popen(
            name,
            argv,
            env={**place, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank, name in enumerate(names)
    ]
    said, _ = ranks[0].communicate(timeout=600)
    codes = [rank.wait(timeout=60) for rank in ranks]
    told = json.loads(said)
    if any(codes) or told["nodes"] != names:
        raise RuntimeError(f"the ranks ended with {codes}: {told['verdict']}: {told['findings']}")
    return float(told["seconds"])


def main() -> None:
    """Measures and prints the table."""
    more = parser(__doc__ or "")
    more.set_defaults(rounds=3)
    more.add_argument("--nodes", default="8,64", help="numbers of nodes (default: %(default)s)")
    options = more.parse_args()
    rows, quickest = [], {}
    for number in map(int, options.nodes.split(",")):
        names = [f"node{index:03d}" for index in range(1, number + 1)]
        with tempfile.TemporaryDirectory() as folder, Hosts(names, Path(folder)) as hosts:
            figures = [look(hosts, "--quick") for _ in range(options.rounds)]
        quickest[number] = max(figures)
        rows.append([str(number), spread(figures, 2)])
    lines = table(["nodes", "seconds of `--quick`"], rows)
    if WANTED_NODES in quickest:
        verdict = "met" if quickest[WANTED_NODES] <= WANTED_S else "MISSED"
        lines += [
            "",
            f"Wanted on {WANTED_NODES} nodes at most {WANTED_S:.0f} s, start-up included: {verdict} by the look.",
        ]
    publish("Preflight: fake hosts, a rank on each", lines, record=options.record)


if __name__ == "__main__":
    main()
