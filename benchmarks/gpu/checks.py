"""Part C, checks of the machine: doctor, bench, NCCL's log, driver, energy; and the tests that a GPU affects."""

import re
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.casework import TRAINER, TRUE, Work, at_least, at_most, case, exactly, json_in

COMMANDS = (*TRAINER, "jinja2", "elftools")


@case(
    part="C", timeout_s=25, on_cpu=True, needs=COMMANDS,
    expect={"exit_code": exactly(0), "failed": exactly(0), "subjects": at_least(9), "names_gpu": TRUE},
    expect_cpu={"exit_code": exactly(0), "failed": exactly(0), "subjects": at_least(9)},
)  # fmt: skip
def doctor(work: Work) -> dict[str, Any]:
    """`muster doctor` looks at the GPU, and finds nothing that would stop a training"""
    ended = work.command("muster", "doctor", "--json", f"--device={work.device}", f"--checkpoint-dir={work.scratch}")
    found = json_in(ended.output)
    figures = {
        "exit_code": ended.code,
        "failed": sum(finding.get("level") == "failed" for finding in found["findings"]),
        "subjects": sum(part["is_seen"] for part in found["parts"]),
    }
    says = {part["name"]: part["says"] for part in found["parts"]}
    if work.on_gpu:
        import torch

        name = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
        figures["names_gpu"] = name in says["GPUs"]
    return figures | {"says": says, "findings": found["findings"]}


@case(
    part="C", timeout_s=45, on_cpu=True, needs=COMMANDS,
    expect={"exit_code": exactly(0), "wrong": exactly(0), "rows": at_least(8), "fastest_algbw": at_least(1, "GB/s")},
    expect_cpu={"exit_code": exactly(0), "wrong": exactly(0), "rows": at_least(8), "fastest_algbw": at_least(0.01)},
)  # fmt: skip
def bench(work: Work) -> dict[str, Any]:
    """`muster bench` measures over NCCL in a group of one (over gloo between two on a CPU): all values right"""
    size = "64M" if work.on_gpu else "1M"
    options = (
        f"--device={work.device}",
        "--collectives=all_reduce,broadcast",
        f"--max-size={size}",
        "--iters=5",
        "--json",
    )
    ended = work.command("muster", "bench", *options)
    found = json_in(ended.output)
    rows = found["rows"]
    return {
        "exit_code": ended.code,
        "wrong": sum(not row["values_ok"] for row in rows),
        "rows": len(rows),
        "fastest_algbw": max(row["algbw"] for row in rows),
        "transport": found["transport"],
    }


@case(
    part="C", timeout_s=30, needs=COMMANDS, expect={"nccl_version": at_least(2), "is_nccl": TRUE, "has_transport": TRUE}
)
def nccl_log(work: Work) -> dict[str, Any]:
    """NCCL's log is read: its version, and what it sends by"""
    ended = work.command("muster", "bench", "--collectives=all_reduce", "--max-size=1M", "--iters=2", "--json")
    found = json_in(ended.output)
    return {
        "nccl_version": float(found["about"]["nccl"]["version"].split(".")[0]),
        "is_nccl": found["setting"]["backend"] == "nccl",
        "has_transport": bool(found["transport"]["says"]),
        "transport": found["transport"],
    }


@case(
    part="C",
    timeout_s=20,
    needs=(*COMMANDS, "pynvml"),
    expect={"same_driver": TRUE, "same_cuda": TRUE, "runs_torch": TRUE},
)
def driver(work: Work) -> dict[str, Any]:
    """The driver and the libcuda that are found are those that the process really loads"""
    import ctypes

    import pynvml
    import torch

    found = json_in(work.command("muster", "version", "--json").output)["driver"]
    pynvml.nvmlInit()
    told = pynvml.nvmlSystemGetDriverVersion()
    torch.cuda.init()
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    loaded = f"{number.value // 1000}.{number.value % 1000 // 10}"
    mapped = Path("/proc/self/maps").read_text().splitlines()
    cuda = [int(part) for part in found["cuda"].split(".")]
    needed = [int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]]
    return {
        "same_driver": found["version"] == (told.decode() if isinstance(told, bytes) else told),
        "same_cuda": found["cuda"] == loaded,
        "runs_torch": cuda[0] >= needed[0],
        "found": found,
        "loaded_from": sorted({line.split()[-1] for line in mapped if "libcuda.so" in line}),
    }


@case(
    part="C", timeout_s=45, needs=(*TRAINER, "pynvml"),
    expect={
        "energy_ratio": at_least(0.6, "the summary's energy by the mean power that NVML tells, over the same seconds"),
        "energy_ratio_below": at_most(1.4, "power is an average over up to a second, and a run has ends"),
    },
)  # fmt: skip
def energy(work: Work) -> dict[str, Any]:
    """The energy in summary.json is that of the steps, by NVML's power beside it"""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    samples, over = list[tuple[float, float]](), threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            samples.append((time.monotonic(), pynvml.nvmlDeviceGetPowerUsage(handle) / 1000))

    thread = threading.Thread(target=sample)
    thread.start()
    options = ("--model=resnet50", "--data=synthetic", "--batch-size=128", "--num-samples=32000", "--max-steps=250")
    try:
        summary = work.train("single", *options, "--epochs=1", "--warmup-steps=0", "--lr=0.0001").summary()
    finally:
        over.set()
        thread.join()
    if summary["energy_j"] is None:
        raise RuntimeError("summary.json has no energy_j")
    timed_s = summary["num_timed_steps"] * summary["step_time_s"]["mean"]
    # Power is highest in the steps: the middle of the upper half of the samples is the power of the steps.
    power = sorted(watts for _, watts in samples)
    busy_w = power[len(power) * 3 // 4]
    ratio = summary["energy_j"] / (busy_w * timed_s)
    return {
        "energy_ratio": ratio,
        "energy_ratio_below": ratio,
        "energy_j": summary["energy_j"],
        "joules_per_image": summary["energy_j_per_image"],
        "busy_w": busy_w,
        "idle_w": power[0],
    }


@case(
    part="C", timeout_s=50, on_cpu=True, needs=(*COMMANDS, "pytest", "pytest_timeout", "hypothesis"),
    expect={"failed": exactly(0), "passed": at_least(20)},
)  # fmt: skip
def pytest_gpu(work: Work) -> dict[str, Any]:
    """The tests that a GPU changes, in a process that sees it (G9)"""
    names = (
        "data/test_images",
        "reporting/test_stopwatch",
        "reporting/test_metrics",
        "models/test_gpt",
        "models/test_flops",
    )
    files = [f"tests/train/{name}.py" for name in (*names, "test_objective")]
    ended = work.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long and not process", *files)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", ended.output)}
    return {
        "failed": counts.get("failed", 0) + counts.get("error", 0) + (ended.code not in (0, 1)),
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
    }
