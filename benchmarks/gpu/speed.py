"""Part D: the speed of training, compared with plain PyTorch loops on the same card in the same minutes.

Each contender is a process of its own, as a user starts it; they run in the order ours, theirs, theirs, ours, so that a
card that gets warm slows both alike. benchmarks/gpu/plain.py has the loops; figures are ratios of samples per second.
"""

import json
import os
import statistics
import time
from typing import Any

from benchmarks.gpu.casework import TRAINER, Work, at_least, at_most, case
from benchmarks.gpu.data import make_images

AS_FAST = at_least(0.97, "ours by the plain loop; 3 % is the spread of two runs of the same")
ON_CPU = at_least(0.2, "a CPU: that both do the same work, not which is faster")
SAME_MEMORY = at_most(1.1, "peak memory of ours by the plain loop's")


def against(
    work: Work, kind: str, unit: str, ours: list[str], plain: list[str], rounds: int = 2, *, with_waits: bool = False
) -> dict[str, Any]:
    """The ratio of ours to a plain loop, in turns, with the rates of both.

    Args:
        with_waits: our rate is that of all steps, with the waits for data between them, not that of the median step.
    """
    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    figures: dict[str, Any] = {}
    scale = next((int(word.partition("=")[2]) for word in plain if word.startswith("--seq-len=")), 1)
    for number, name in enumerate(("ours", "plain", "plain", "ours")[: 2 * rounds]):
        if name == "ours":
            summary = work.train("single", *ours, name=f"round{number}").summary()
            # Medians of both, so that a step delayed by other programs on the machine counts for neither.
            in_steps = summary["global_batch"] * scale / summary["step_time_s"]["p50"]
            rates["ours"].append(summary["images_per_second"] if with_waits else in_steps)
            figures |= {"mfu": summary["mfu"], "peak_gib": summary["peak_memory_gib"]}
            figures |= {"flops_per_sample": summary["flops_per_sample"], "first_step_s": summary["first_step_s"]}
        else:
            ended = work.python("-m", "benchmarks.gpu.plain", kind, f"--device={work.device}", *plain)
            found = json.loads(ended.told[-1])
            rates["plain"].append(found["samples_per_second"] * scale)
            figures["plain_peak_gib"] = found["peak_gib"]
    middle = {name: statistics.mean(values) for name, values in rates.items()}
    if work.on_gpu:
        figures["memory_ratio"] = figures["peak_gib"] / figures["plain_peak_gib"]
    return figures | {"ratio": middle["ours"] / middle["plain"], f"{unit}_per_second": middle, "rounds": rates}


def resnet(work: Work, kind: str = "resnet", *, compiled: bool = False) -> dict[str, Any]:
    """ResNet-50 at 224 pixels on a GPU."""
    model, size, batch, steps = ("resnet50", 224, 256, 80) if work.on_gpu else ("resnet18", 32, 8, 22)
    plain = [f"--model={model}", f"--image-size={size}", f"--batch-size={batch}", f"--steps={steps}"]
    ours = [f"--model={model}", f"--image-size={size}", f"--batch-size={batch}", f"--max-steps={steps}"]
    ours += ["--data=synthetic", f"--num-samples={steps * batch}", "--epochs=1", "--lr=0.001"]
    ours += [] if work.on_gpu else ["--no-bf16"]
    both = (["--compile=default"], ["--compile"]) if compiled else ([], [])
    return against(work, kind, "images", ours + both[0], plain + both[1], rounds=2 if work.on_gpu else 1)


def gpt(work: Work, *, compiled: bool = False) -> dict[str, Any]:
    """GPT-124M with sequences of 1,024 tokens on a GPU."""
    model, length, vocab, batch, steps = (
        ("gpt-124m", 1024, 50304, 16, 80) if work.on_gpu else ("gpt-tiny", 32, 256, 4, 22)
    )
    sizes = [f"--model={model}", f"--seq-len={length}", f"--vocab-size={vocab}", f"--batch-size={batch}"]
    ours = [*sizes, f"--max-steps={steps}", "--data=synthetic", f"--num-samples={steps * batch}", "--epochs=1"]
    ours += ["--clip-norm=1", *([] if work.on_gpu else ["--no-bf16"])]
    plain = [*sizes, f"--steps={steps}"]
    both = (["--compile=default"], ["--compile"]) if compiled else ([], [])
    return against(work, "gpt", "tokens", ours + both[0], plain + both[1], rounds=2 if work.on_gpu else 1)


FAST = {"ratio": AS_FAST, "memory_ratio": SAME_MEMORY}
FAST_CPU = {"ratio": ON_CPU}


@case(part="D", timeout_s=80, on_cpu=True, expect=FAST, expect_cpu=FAST_CPU)
def resnet50(work: Work) -> dict[str, Any]:
    """ResNet-50, bf16, channels_last, data that cost nothing, beside torchvision's model in a plain loop"""
    return resnet(work)


@case(part="D", timeout_s=120, expect=FAST)
def resnet50_compiled(work: Work) -> dict[str, Any]:
    """The same, both compiled"""
    return resnet(work, compiled=True)


@case(part="D", timeout_s=75, needs=(*TRAINER, "timm"), expect={"ratio": AS_FAST})
def resnet50_timm(work: Work) -> dict[str, Any]:
    """The same beside timm's ResNet-50"""
    return resnet(work, "timm")


@case(part="D", timeout_s=100, on_cpu=True, expect={"ratio": AS_FAST}, expect_cpu=FAST_CPU)
def resnet50_jpegs(work: Work) -> dict[str, Any]:
    """ResNet-50 on JPEGs from files, beside torchvision's ImageFolder and torch's DataLoader with as many workers"""
    size, batch, steps, model = (224, 128, 60, "resnet50") if work.on_gpu else (32, 4, 22, "resnet18")
    num_images, workers = (1024, len(os.sched_getaffinity(0)) - 1) if work.on_gpu else (64, 1)
    folder = make_images(work.scratch / "images", num_images)
    sizes = [f"--model={model}", f"--image-size={size}", f"--batch-size={batch}"]
    ours = [*sizes, f"--data=imagefolder:{folder}", f"--max-steps={steps}", "--epochs=100", "--lr=0.001"]
    ours += [f"--train-num-workers={workers}", "--blocking-save", *([] if work.on_gpu else ["--no-bf16"])]
    plain = [*sizes, f"--data={folder}", f"--steps={steps}", f"--num-workers={workers}"]
    return against(work, "jpegs", "images", ours, plain, rounds=2 if work.on_gpu else 1, with_waits=True)


@case(part="D", timeout_s=80, on_cpu=True, expect={**FAST, "mfu": at_least(0.2)}, expect_cpu=FAST_CPU)
def gpt_124m(work: Work) -> dict[str, Any]:
    """GPT-124M, bf16, beside nanoGPT's loop around the same model"""
    return gpt(work)


@case(part="D", timeout_s=120, expect={**FAST, "mfu": at_least(0.3, "a transformer of this size, compiled")})
def gpt_124m_compiled(work: Work) -> dict[str, Any]:
    """The same, both compiled"""
    return gpt(work, compiled=True)


@case(
    part="D", timeout_s=25, on_cpu=True, needs=("torch",),
    expect={
        "bf16_tflops": at_least(400, "H100 and H200: 989 dense by the datasheet"),
        "copy_gb_per_s": at_least(2000, "read and written; H100 3,350, H200 4,800 by the datasheets"),
    },
    expect_cpu={"bf16_tflops": at_least(1e-4), "copy_gb_per_s": at_least(0.1)},
)  # fmt: skip
def ceilings(work: Work) -> dict[str, Any]:
    """What this card reaches in a large matrix product and a large copy: the roofline that other figures stand under"""
    import torch

    device, num = torch.device(work.device), 8192 if work.on_gpu else 512
    synchronise = torch.cuda.synchronize if work.on_gpu else lambda: None

    def seconds_of(run: Any, repeats: int = 10) -> float:
        taken = []
        for _ in range(repeats):
            synchronise()
            started = time.perf_counter()
            run()
            synchronise()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[2:])

    # Random numbers, because a card multiplies zeros faster.
    one, other = (torch.randn(num, num, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30 if work.on_gpu else 2**22, device=device)
    target = torch.empty_like(source)
    product_s, copy_s = seconds_of(lambda: one @ other), seconds_of(lambda: target.copy_(source))
    return {"bf16_tflops": 2 * num**3 / product_s / 1e12, "copy_gb_per_s": 2 * source.nbytes / copy_s / 1e9}


@case(
    part="D", timeout_s=35, on_cpu=True,
    expect={"start_s": at_most(30, "from the command to the first step"), "over_plain_s": at_most(8)},
    expect_cpu={"start_s": at_most(120), "over_plain_s": at_most(60)},
)  # fmt: skip
def start_up(work: Work) -> dict[str, Any]:
    """Seconds from the command to the end of the first step, by phase, beside the plain loop's"""
    options = ("--model=resnet18", "--data=synthetic", "--image-size=32", "--batch-size=8", "--num-samples=80")
    ended = work.train("ddp", *options, "--epochs=1", "--max-steps=1", "--log-every=1", num_ranks=1)
    summary = ended.summary()
    plain = work.python(
        "-m", "benchmarks.gpu.plain", "resnet", f"--device={work.device}", "--model=resnet18", "--image-size=32"
    )
    plain_s = json.loads(plain.told[-1])["first_step_s"]
    lines = ended.records("steps")
    run_s = lines[0]["seconds"]
    return {
        "start_s": ended.seconds - (summary["seconds"] - run_s),
        "over_plain_s": ended.seconds - (summary["seconds"] - run_s) - plain_s,
        "phases": {
            "launch_imports_and_end": ended.seconds - summary["seconds"],
            "set_up_and_first_step": run_s,
            "first_step": summary["first_step_s"],
        },
    }
