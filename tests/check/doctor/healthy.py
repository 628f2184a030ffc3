"""Facts of healthy nodes, written by hand; tests change single values into faults."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from muster.check.doctor import gpus, memory, network, software, storage
from muster.check.doctor.finding import Finding
from muster.check.doctor.gpus import Gpu
from muster.check.doctor.storage import Space

GIB = 2**30

SUBJECTS = (software, gpus, memory, storage, network)
"""The subjects whose facts a node gathers without other nodes."""

Told = dict[str, dict[str, list[Any]]]
"""The Facts of all ranks by the subject's NAME and by host."""

SOFTWARE = software.Facts(
    image="1.2.0 (0123456789ab)",
    packages=("numpy 2.2.0", "torch 2.10.0"),
    code="c" * 12,
    python="3.12",
    torch="2.10.0+cu128, CUDA 12.8",
    nccl="2.27.5",
    nccl_path="/opt/venv/lib/libnccl.so.2",
    cudnn="9.10.2",
    variables={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_NET": "IB"},
)


def gpu(index: int) -> Gpu:
    """A healthy H100, with values written by hand."""
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        used=0,
        uncorrected=0,
        mig=False,
        links=18,
    )


def healthy(num_nodes: int = 3, a_node: int = 2) -> Told:
    """The Facts of node01 and so on: InfiniBand, `a_node` GPUs, and as many ranks, each bound to 8 cores."""
    told: Told = {subject.NAME: {} for subject in SUBJECTS}
    for number in range(num_nodes):
        host, first = f"node{number + 1:02}", number * a_node
        told["software"][host] = [SOFTWARE]
        cards = tuple(gpu(index) for index in range(a_node))
        visible = ",".join(map(str, range(a_node)))
        told["GPUs"][host] = [
            gpus.Facts(rank=first + local, visible=visible, num_gpus=a_node) for local in range(a_node)
        ]
        told["memory"][host] = [
            memory.Facts(
                rank=first + local, uses_gpu=True, cores=tuple(range(local * 8, local * 8 + 8)), open_files=65536
            )
            for local in range(a_node)
        ]
        space = Space(path="/scratch", size=10**15, free=10**14)
        told["storage"][host] = [storage.Facts(checkpoints=space)]
        own = network.Facts(address=f"10.0.0.{number + 1}", interface="ib0")
        told["network"][host] = [own] * a_node
        shm = Space(path="/dev/shm", size=256 * GIB, free=256 * GIB)
        told = with_node(told, host, gpus=cards, driver="580.65.06", memory_free=500 * GIB, shm=shm)
        told = with_node(
            told,
            host,
            fabric="infiniband",
            ports={"mlx5_0/1": 200, "mlx5_1/1": 200},
        )
    return told


def with_node(told: Told, host: str, **changed: Any) -> Told:
    """`told` with the values `changed` in the Facts of a host's first rank, in all subjects that have such a field."""
    return with_ranks(told, host, lambda rank: changed, first_only=True)


def with_ranks(told: Told, host: str, change: Callable[[Any], dict[str, Any]], *, first_only: bool = False) -> Told:
    """`told` with the values that `change` gives for the Facts of each rank of a host; an empty `host` means all."""
    done: Told = {}
    for name, by_host in told.items():
        done[name] = {each: list(facts) for each, facts in by_host.items()}
        for each in done[name] if not host else [host]:
            facts = done[name][each]
            for index in range(1 if first_only else len(facts)):
                own = {field.name for field in fields(facts[index])}
                values = {field: value for field, value in change(facts[index]).items() if field in own}
                facts[index] = replace(facts[index], **values)
    return done


def with_gpu(told: Told, host: str, index: int, **changed: Any) -> Told:
    """`told` with the values `changed` of one GPU."""
    cards = [replace(card, **changed) if card.index == index else card for card in told["GPUs"][host][0].gpus]
    return with_node(told, host, gpus=tuple(cards))


def on_cpus(told: Told) -> Told:
    """`told` without GPUs."""
    told = with_ranks(told, "", lambda rank: {"visible": None, "num_gpus": 0, "uses_gpu": False})
    return with_ranks(told, "", lambda rank: {"gpus": None, "driver": None})


def found(told: Told) -> list[Finding]:
    """All findings of `told`."""
    return [finding for subject in SUBJECTS for finding in subject.findings(told[subject.NAME])]


def only(told: Told) -> Finding:
    """The one finding of `told`."""
    (finding,) = found(told)
    return finding


def found_of(told: dict[str, Any]) -> list[Finding]:
    """The findings in the object that `--json` printed."""
    return [Finding(**finding) for finding in told["findings"]]
