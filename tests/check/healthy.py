"""Facts of healthy nodes, written by hand; a test makes something in them bad."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from muster.check.doctor.facts import UNLIMITED, Facts, Finding, Gpu, Node, PcieLink, Port, Rank, Software, Space
from muster.check.doctor.run import findings

GIB = 2**30

SOFTWARE = Software(
    image="1.2.0",
    revision="0123456789abcdef",
    lock="a" * 64,
    packages=("numpy 2.2.0", "torch 2.10.0"),
    code="c" * 64,
    python="3.12.3",
    torch="2.10.0+cu128",
    cuda="12.8",
    nccl="2.27.5",
    nccl_path="/opt/venv/lib/libnccl.so.2",
    cudnn="9.10.2",
    driver="580.65.06",
)


PORT = Port(name="mlx5_0/1", is_active=True, rate_gbit_s=200)
ADAPTER = PcieLink(name="mlx5_0", is_gpu=False, width=16, max_width=16, speed_gt_s=16, max_speed_gt_s=16)


def gpu(index: int) -> Gpu:
    """A healthy H100; its values are written, no GPU was asked."""
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        used=0,
        uncorrected=0,
        clock_mhz=1980,
        max_clock_mhz=1980,
        mig=False,
        links=18,
    )


def node(host: str, gpus: int = 2) -> Node:
    """A node with InfiniBand and so many GPUs."""
    return Node(
        host=host,
        software=SOFTWARE,
        gpus=tuple(gpu(index) for index in range(gpus)),
        memory_free=500 * GIB,
        shm=Space(path="/dev/shm", size=256 * GIB, free=256 * GIB),
        checkpoints=Space(path="/scratch", size=10**15, free=10**14, files_free=10**9),
        memlock=UNLIMITED,
        open_files=65536,
        interfaces=("eth0", "ib0"),
        fabric="infiniband",
        ports=(PORT, replace(PORT, name="mlx5_1/1")),
        pcie=(ADAPTER, replace(ADAPTER, name="GPU at 0000:17:00.0", is_gpu=True, speed_gt_s=2.5)),
        devices=("/dev/infiniband/uverbs0",),
        variables={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_NET": "IB"},
    )


def healthy(num_nodes: int = 3, a_node: int = 2) -> Facts:
    """node01 and so on, each with as many GPUs as ranks, bound to 8 cores a rank."""
    ranks: list[Rank] = []
    for number in range(num_nodes):
        host = f"node{number + 1:02}"
        for local in range(a_node):
            ranks.append(
                Rank(
                    rank=number * a_node + local,
                    host=host,
                    local_rank=local,
                    visible=",".join(map(str, range(a_node))),
                    num_gpus=a_node,
                    cores=tuple(range(local * 8, local * 8 + 8)),
                    address=f"10.0.0.{number + 1}",
                    interface="ib0",
                    node=node(host, a_node) if local == 0 else None,
                )
            )
    return Facts(ranks)


def with_node(facts: Facts, host: str, **changed: Any) -> Facts:
    """`facts` with other values of a node; those of `software` by their names."""
    own = {name: value for name, value in changed.items() if name in Node.__dataclass_fields__}
    installed = {name: value for name, value in changed.items() if name in Software.__dataclass_fields__}

    def change(rank: Rank) -> Rank:
        if rank.host != host or rank.node is None:
            return rank
        software = replace(rank.node.software, **installed)
        return replace(rank, node=replace(rank.node, **{"software": software, **own}))

    return replace(facts, ranks=[change(rank) for rank in facts.ranks])


def with_gpu(facts: Facts, host: str, index: int, **changed: Any) -> Facts:
    """`facts` with other values of one GPU."""
    there = next(each for each in facts.nodes if each.host == host)
    cards = [replace(card, **changed) if card.index == index else card for card in there.gpus or ()]
    return with_node(facts, host, gpus=cards)


def with_ranks(facts: Facts, host: str, change: Callable[[Rank], Rank]) -> Facts:
    """`facts` with the ranks of a host changed."""
    return replace(facts, ranks=[change(rank) if rank.host == host else rank for rank in facts.ranks])


def found(facts: Facts) -> Sequence[Finding]:
    """All findings of `facts`."""
    return [finding for part in findings(facts) for finding in part.findings]


def only(facts: Facts) -> Finding:
    """The one finding of `facts`."""
    (finding,) = found(facts)
    return finding


def found_of(told: dict[str, Any]) -> list[Finding]:
    """The findings in what `--json` printed."""
    return [Finding(**finding) for finding in told["findings"]]
