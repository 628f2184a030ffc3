"""Part A: a training on a GPU changes the weights as a training on a CPU does.

The measure is `updates_apart`: how far the change of all weights in three steps is from that of the reference, relative
to the norm of the latter. The reference is one process on the CPU in fp32, with the same first weights and batches. An
error (a missing gradient, a wrong mean, a lost micro-batch) makes it 0.1 or more.
"""

from pathlib import Path
from typing import Any

from benchmarks.gpu.casework import ROOT, TRUE, Work, at_least, at_most, case, exactly, json_in

FP32 = at_most(1e-3, "fp32: sums in another order, 1e-7 each, through three steps")
FP32_LOSS = at_most(1e-4, "fp32")
TF32 = at_most(0.02, "tf32: products of 10 bits, 1e-3 each")
BF16 = at_most(0.08, "bf16: 8 bits, 4e-3 each, through all layers")
BF16_LOSS = at_most(0.01, "bf16: 8 bits")
IN_FP32 = {"updates_apart": FP32, "losses_apart": FP32_LOSS}
IN_TF32 = {"updates_apart": TF32, "losses_apart": at_most(2e-3, "tf32")}
IN_BF16 = {"updates_apart": BF16, "losses_apart": BF16_LOSS}
IN_CONVOLUTIONS = {
    "updates_apart": at_most(0.1, "convolutions compute in tf32 by torch's default; batch normalisation amplifies"),
    "losses_apart": at_most(0.02, "tf32 through 18 layers"),
}
BITS = exactly(0, "the same bits")


def beside_cpu(work: Work, model: str, strategy: str = "single", **options: Any) -> dict[str, float]:
    """The figures of `strategy` in a group of one on the device, beside one process in fp32 on the CPU."""
    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    usual = training.options_of(model)
    reference = training.train(usual, World())
    device = training.device_of(work.device)
    asked = training.options_of(model, **options)
    if strategy == "single":
        return training.compare(reference, training.train(asked, World(device=device)))
    with training.group_of_one(device) as world:
        return training.compare(reference, training.train(asked, world, strategy))


@case(part="A", timeout_s=17, expect=IN_FP32, on_cpu=True)
def single_fp32(work: Work) -> dict[str, Any]:
    """A transformer in fp32, one process"""
    return beside_cpu(work, "gpt-tiny")


@case(part="A", timeout_s=17, expect=IN_TF32)
def single_tf32(work: Work) -> dict[str, Any]:
    """The same where matrix products are allowed to use tf32"""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    return beside_cpu(work, "gpt-tiny")


@case(part="A", timeout_s=17, expect=IN_BF16, on_cpu=True)
def single_bf16(work: Work) -> dict[str, Any]:
    """The same under bf16 autocast"""
    return beside_cpu(work, "gpt-tiny", bf16=True)


@case(part="A", timeout_s=17, expect=IN_CONVOLUTIONS, on_cpu=True)
def single_resnet(work: Work) -> dict[str, Any]:
    """ResNet-18, channels_last and fused SGD"""
    return beside_cpu(work, "resnet18")


@case(
    part="A", timeout_s=17, on_cpu=True,
    expect={"gradients_apart": at_most(1e-4, "fp32 against fp64: 6e-8 each, through forward and backward")},
)  # fmt: skip
def gradients_fp64(work: Work) -> dict[str, Any]:
    """The first gradients in fp32 against those in double precision on the CPU"""
    import torch

    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    options = training.options_of("gpt-tiny", clip_norm=None)
    exact = training.train(options, World(), num_steps=1, dtype=torch.float64)
    found = training.train(options, World(device=training.device_of(work.device)), num_steps=1)
    return {"gradients_apart": training.distance(exact.gradients, found.gradients)}


@case(part="A", timeout_s=17, expect=IN_FP32, on_cpu=True)
def ddp_group_of_one(work: Work) -> dict[str, Any]:
    """ddp in a group of one rank: over NCCL on a GPU"""
    return beside_cpu(work, "gpt-tiny", "ddp")


@case(part="A", timeout_s=17, expect=IN_FP32, on_cpu=True)
def fsdp_group_of_one(work: Work) -> dict[str, Any]:
    """fsdp in a group of one rank"""
    return beside_cpu(work, "gpt-tiny", "fsdp")


@case(part="A", timeout_s=17, expect=IN_FP32, on_cpu=True)
def fsdp_offload(work: Work) -> dict[str, Any]:
    """fsdp with weights and moments in the host's memory"""
    return offloaded(work, "gpt-tiny")


@case(part="A", timeout_s=17, expect=IN_CONVOLUTIONS, on_cpu=True)
def fsdp_offload_batch_norm(work: Work) -> dict[str, Any]:
    """The same for ResNet-18, whose batch normalisation has buffers (G3)"""
    return offloaded(work, "resnet18")


def offloaded(work: Work, model: str) -> dict[str, Any]:
    """fsdp with --cpu-offload, over a group that can also sum tensors in the host's memory."""
    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    device = training.device_of(work.device)
    reference = training.train(training.options_of(model), World())
    backend = "cpu:gloo,cuda:nccl" if work.on_gpu else "gloo"
    with training.group_of_one(device, backend) as world:
        found = training.train(training.options_of(model, cpu_offload=True), world, "fsdp")
    return training.compare(reference, found)


@case(part="A", timeout_s=17, expect=IN_BF16, on_cpu=True)
def fsdp_bf16(work: Work) -> dict[str, Any]:
    """fsdp in bf16: weights are gathered in bf16, gradients are reduced in fp32"""
    return beside_cpu(work, "gpt-tiny", "fsdp", bf16=True)


@case(part="A", timeout_s=17, expect=IN_FP32, on_cpu=True)
def tp_group_of_one(work: Work) -> dict[str, Any]:
    """tp in a group of one rank"""
    return beside_cpu(work, "gpt-tiny", "tp")


@case(part="A", timeout_s=17, expect={"bf16_updates_apart": BF16, "fp16_updates_apart": TF32})
def ddp_hooks(work: Work) -> dict[str, Any]:
    """ddp whose gradients travel as bf16 and as fp16, over NCCL"""
    found = {kind: beside_cpu(work, "gpt-tiny", "ddp", comm_hook=kind) for kind in ("bf16", "fp16")}
    return {f"{kind}_updates_apart": figures["updates_apart"] for kind, figures in found.items()}


@case(part="A", timeout_s=17, expect=IN_CONVOLUTIONS)
def ddp_sync_batch_norm(work: Work) -> dict[str, Any]:
    """ddp with batch normalisation over all ranks, which has kernels for GPUs alone"""
    return beside_cpu(work, "resnet18", "ddp", sync_bn=True)


@case(part="A", timeout_s=17, on_cpu=True, expect={"wrong": exactly(0, "sums of small whole numbers are exact")})
def collectives(work: Work) -> dict[str, Any]:
    """Each collective of torch's in a group of one: over NCCL on a GPU"""
    import torch
    import torch.distributed as dist

    from benchmarks.gpu import training

    device, wrong = training.device_of(work.device), []
    with training.group_of_one(device):
        given = torch.arange(1024, device=device, dtype=torch.float32)

        def expect(name: str, found: "torch.Tensor") -> None:
            if not torch.equal(found, given):
                wrong.append(name)

        for name in ("all_reduce", "broadcast", "reduce"):
            own = given.clone()
            getattr(dist, name)(own, *(() if name == "all_reduce" else (0,)))
            expect(name, own)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            if name == "all_to_all_single" and not work.on_gpu:
                continue  # gloo has it for more than one rank only in newer releases
            own = torch.zeros_like(given)
            getattr(dist, name)(own, given)
            expect(name, own)
        dist.barrier()
        answers: list[Any] = [None]
        dist.all_gather_object(answers, {"rank": 0})
        wrong += [] if answers == [{"rank": 0}] else ["all_gather_object"]
    return {"wrong": len(wrong), "names": wrong}


@case(
    part="A", timeout_s=17, on_cpu=True,
    expect={
        "selective_apart": at_most(1e-5, "the same sums again"),
        "full_apart": at_most(1e-5, "the same sums again"),
        "memory_share": at_most(0.95, "full recomputation holds no activations of the layers"),
    },
    expect_cpu={"selective_apart": at_most(1e-5), "full_apart": at_most(1e-5)},
)  # fmt: skip
def activation_checkpointing(work: Work) -> dict[str, Any]:
    """Activations that are computed again: the same weights from less memory"""
    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    world = World(device=training.device_of(work.device))
    sizes = {"batch_size": 32, "seq_len": 128} if work.on_gpu else {}
    runs = {
        level: training.train(training.options_of("gpt-tiny", activation_checkpoint=level, **sizes), world)
        for level in ("none", "selective", "full")
    }
    figures = {f"{level}_apart": training.updates_apart(runs["none"], runs[level]) for level in ("selective", "full")}
    return figures | {"memory_share": runs["full"].peak_gib / runs["none"].peak_gib if work.on_gpu else None}


@case(
    part="A", timeout_s=17, on_cpu=True,
    expect={f"{kind}_{way}_apart": at_most(1e-4, "fp32") for kind in ("sgd", "adamw") for way in ("fused", "foreach")},
)  # fmt: skip
def optimizers(work: Work) -> dict[str, Any]:
    """Fused and foreach kernels of SGD and AdamW beside the plain loop over parameters"""
    from functools import partial

    import torch

    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    world, figures = World(device=training.device_of(work.device)), dict[str, float]()
    # AdamW divides by a gradient's size: without this eps, rounding errors of a gradient near 0 would make whole steps.
    kinds = {
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, lr=1e-3, eps=1e-3),
    }
    ways = {"plain": {"foreach": False}, "fused": {"fused": True}, "foreach": {"foreach": True}}
    for name, kind in kinds.items():
        runs = {
            way: training.train(
                training.options_of("gpt-tiny"), world,
                build_optimizer=lambda model, own=own, kind=kind: kind(model.parameters(), **own),
            )
            for way, own in ways.items()
        }  # fmt: skip
        figures |= {
            f"{name}_{way}_apart": training.updates_apart(runs["plain"], runs[way]) for way in ("fused", "foreach")
        }
    return figures


@case(
    part="A", timeout_s=17,
    expect={
        "gpt_apart": at_most(0.02, "fp16: 11 bits"),
        "resnet_apart": at_most(0.2, "fp16: 11 bits, amplified by batch normalisation"),
        "skipped_steps": exactly(0, "a scale of 1024 overflows nowhere"),
    },
)  # fmt: skip
def fp16_scaled(work: Work) -> dict[str, Any]:
    """fp16 autocast with a scaled loss, as torch has it: our models are safe in it"""
    import torch

    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    figures, world = dict[str, float](), World(device=training.device_of(work.device))
    skipped = 0.0
    for name, model in (("gpt", "gpt-tiny"), ("resnet", "resnet18")):
        options = training.options_of(model)
        scaler = torch.amp.GradScaler(work.device, init_scale=1024.0)
        found = training.train(options, world, scaler=scaler)
        figures[f"{name}_apart"] = training.updates_apart(training.train(options, World()), found)
        skipped += scaler.get_scale() < 1024.0
    return {**figures, "skipped_steps": skipped}


@case(part="A", timeout_s=17, on_cpu=True, expect={"gpt_difference": BITS, "resnet_difference": BITS})
def deterministic(work: Work) -> dict[str, Any]:
    """--deterministic twice: the same bits"""
    import os

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    from benchmarks.gpu import training
    from muster.train.distributed.world import World

    world, figures = World(device=training.device_of(work.device)), dict[str, float]()
    for name, model in (("gpt", "gpt-tiny"), ("resnet", "resnet18")):
        options = training.options_of(model, deterministic=True)
        one, other = (training.train(options, world) for _ in range(2))
        figures[f"{name}_difference"] = float((training.flat(one.after) - training.flat(other.after)).abs().max())
    return figures


@case(
    part="A", timeout_s=50, on_cpu=True,
    expect={"loss_apart": at_most(0.01, "fused kernels sum in another order, under bf16"), "compiled": TRUE},
    expect_cpu={"loss_apart": at_most(1e-3, "fp32"), "compiled": TRUE},
)  # fmt: skip
def compiled(work: Work) -> dict[str, Any]:
    """--compile=default beside no compilation: a training of its own each"""
    options = (*TOKENS, "--max-steps=3", *(() if work.on_gpu else ("--no-bf16",)))
    usual, found = (
        work.train("single", *options, f"--compile={way}", name=way).summary() for way in ("off", "default")
    )
    losses = [run["final_train_loss"] for run in (usual, found)]
    return {"loss_apart": abs(losses[0] - losses[1]) / losses[0], "compiled": found["options"]["compile"] == "default"}


TOKENS = (
    *("--model=gpt-tiny", f"--data=tokens:{ROOT / 'train' / 'data' / 'sampler.py'}", "--seq-len=32", "--batch-size=4"),
    *("--epochs=1", "--warmup-steps=0", "--seed=1", "--optimizer=sgd", "--lr=0.1"),
)
"""Options of a short training on a file of this repository as text."""


def weights_in(run: Path) -> dict[str, Any]:
    """The model in the newest checkpoint of a run."""
    from muster.train.checkpoint import manager

    return {name: tensor.double() for name, tensor in manager.load_newest(run)[1]["model"].items()}


@case(part="A", timeout_s=45, on_cpu=True, expect={"difference": BITS, "step": exactly(6)})
def resume(work: Work) -> dict[str, Any]:
    """Three steps, and three more by --resume: the bits of six steps"""
    options = (*TOKENS, "--deterministic", "--no-bf16")
    work.train("single", *options, "--max-steps=6", name="straight").summary()
    work.train("single", *options, "--max-steps=3", name="parts").summary()
    summary = work.train("single", *options, "--max-steps=6", "--resume", name="parts").summary()
    one, other = (weights_in(work.scratch / name) for name in ("straight", "parts"))
    return {"difference": max(float((one[name] - other[name]).abs().max()) for name in one), "step": summary["step"]}


@case(part="A", timeout_s=45, expect={"weights_apart": at_most(1e-4, "fp32"), "step": exactly(6)})
def checkpoint_cpu_gpu(work: Work) -> dict[str, Any]:
    """A run that goes on from the CPU to the GPU and back, by its checkpoints"""
    from benchmarks.gpu import training

    options = (*TOKENS, "--no-bf16", "--blocking-save")
    step = 0
    for device, max_steps in (("cpu", 2), ("cuda", 4), ("cpu", 6)):
        more = ("--resume",) if max_steps > 2 else ()
        moved = work.train("single", *options, f"--device={device}", f"--max-steps={max_steps}", *more, name="moved")
        step = moved.summary()["step"]
    work.train("single", *options, "--device=cpu", "--max-steps=6", name="stayed").summary()
    one, other = (weights_in(work.scratch / name) for name in ("stayed", "moved"))
    return {"weights_apart": training.distance(one, other), "step": step}


@case(
    part="A", timeout_s=30, on_cpu=True,
    expect={"accuracy": at_least(0.9, "handwritten digits by ResNet-18 after 4 epochs"), "world_size": exactly(1)},
    expect_cpu={"accuracy": at_least(0.6, "after 1 epoch; 0.1 is chance"), "world_size": exactly(1)},
)  # fmt: skip
def train_digits(work: Work) -> dict[str, Any]:
    """`train ddp` as a user types it learns the handwritten digits"""
    summary = work.train("ddp", f"--epochs={4 if work.on_gpu else 1}", num_ranks=1).summary()
    return {"accuracy": summary["best_accuracy"], "world_size": summary["world_size"]}


@case(
    part="A", timeout_s=120, on_cpu=True,
    expect={
        "exit_code": exactly(0), "rows": at_least(8, "ddp, fsdp, tp and pipeline, each as it has options"),
        "not_passed": exactly(0), "has_pipeline": TRUE,
    },
)  # fmt: skip
def selftest(work: Work) -> dict[str, Any]:
    """`train selftest`: every strategy, pipeline's schedules too, beside the single process on the same device"""
    ended = work.python("-m", "muster.train.selftest", "--json")
    rows = json_in(ended.output)
    return {
        "exit_code": ended.code,
        "rows": len(rows),
        "not_passed": sum(not row["passed"] for row in rows),
        "has_pipeline": any(row["strategy"] == "pipeline" for row in rows),
        "found": rows,
    }


@case(part="A", timeout_s=20, num_gpus=2, expect=IN_BF16)
def dp_two_gpus_bf16(work: Work) -> dict[str, Any]:
    """dp over two GPUs computes in bf16, not in fp16 without a scaler (G2)"""
    return beside_cpu(work, "gpt-tiny", "dp", bf16=True)


@case(part="A", timeout_s=35, on_cpu=True, expect={"weights_apart": at_most(1e-5, "fp32"), "world_size": exactly(2)})
def ddp_two_ranks(work: Work) -> dict[str, Any]:
    """Two ranks of ddp, which share a GPU over gloo, beside one that accumulates the same micro-batches (G15)"""
    from benchmarks.gpu import training

    options = (*TOKENS, "--no-bf16", "--max-steps=3")
    shares = ("--share-gpus",) if work.on_gpu else ()
    summary = work.train("ddp", *options, *shares, name="two", num_ranks=2).summary()
    work.train("single", *options, "--accumulate=2", name="one").summary()
    one, other = (weights_in(work.scratch / name) for name in ("one", "two"))
    return {"weights_apart": training.distance(one, other), "world_size": summary["world_size"]}
