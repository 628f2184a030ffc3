"""Part C, data: images reach the model correctly and in time, and nothing makes the CPU wait for the GPU.

The images are made here: smooth with noise, 500 x 375 pixels, about 60 KB as JPEG, like those of ImageNet.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.casework import Skip, Work, at_least, at_most, case, exactly

NUM_CLASSES = 4


def make_images(folder: Path, num_images: int, width: int = 500, height: int = 375) -> Path:
    """A folder of JPEGs in classes, the same at each call."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(0)
    for number in range(num_images):
        coarse = drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + drawn.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
        place = folder / f"class{number % NUM_CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number:05}.jpg", quality=90)
    return folder


@case(
    part="C", timeout_s=20,
    expect={
        "mean_difference": at_most(2, "levels of 255: nvJPEG and libjpeg round differently, and upsample colours so"),
        "share_above_16": at_most(0.02, "pixels at edges"),
    },
)  # fmt: skip
def nvjpeg_agrees(work: Work) -> dict[str, Any]:
    """nvJPEG and the CPU's decoder give the same pictures (G1)"""
    import torch

    from muster.train.data import images, nvjpeg

    files = sorted(make_images(work.scratch / "images", 32).rglob("*.jpg"))
    contents = [path.read_bytes() for path in files]
    crops = [images.Crop(20, 30, 300, 400, number % 2 == 1) for number in range(len(files))]
    joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    encoded = nvjpeg.Encoded(joined, list(map(len, contents)), crops)
    found = nvjpeg.decode(encoded, 224, torch.device("cuda", 0)).cpu().float()
    expected = torch.stack(
        [
            images.decode_crop(content, 224, lambda *_, crop=crop: crop)
            for content, crop in zip(contents, crops, strict=True)
        ]
    ).float()
    apart = (found - expected).abs()
    return {"mean_difference": float(apart.mean()), "share_above_16": float((apart > 16).float().mean())}


IMAGES = ("--model=resnet18", "--epochs=1", "--warmup-steps=0", "--lr=0.001", "--seed=1")


@case(
    part="C", timeout_s=35,
    expect={"loss_apart": at_most(0.05, "the same crops, decoded otherwise, under bf16"), "step": exactly(6)},
)  # fmt: skip
def nvjpeg_trains(work: Work) -> dict[str, Any]:
    """A training with --decoder=nvjpeg beside one with --decoder=cpu"""
    folder = make_images(work.scratch / "images", 256)
    options = (*IMAGES, f"--data=imagefolder:{folder}", "--batch-size=32", "--max-steps=6", "--train-num-workers=4")
    runs = {
        name: work.train("single", *options, f"--decoder={name}", name=name).summary() for name in ("cpu", "nvjpeg")
    }
    losses = [run["final_train_loss"] for run in runs.values()]
    return {"loss_apart": abs(losses[0] - losses[1]) / losses[0], "step": runs["nvjpeg"]["step"]}


@case(part="C", timeout_s=20, expect={"exit_code": exactly(1), "errors_told": exactly(1), "tracebacks": exactly(0)})
def nvjpeg_damaged(work: Work) -> dict[str, Any]:
    """A JPEG that ends in the middle, by nvJPEG: three lines"""
    from benchmarks.gpu.faults import told

    folder = make_images(work.scratch / "images", 64)
    for path in sorted(folder.rglob("*.jpg"))[::2]:
        path.write_bytes(path.read_bytes()[:700])
    options = (*IMAGES, f"--data=imagefolder:{folder}", "--batch-size=16", "--max-steps=6")
    return told(work.train("single", *options, "--decoder=nvjpeg"))


FEEDS = {
    "feeds_ratio": at_least(0.9, "images a second from files, by those of data that cost nothing"),
    "data_wait_share": at_most(0.1, "of the time of a step"),
}


@case(
    part="C", timeout_s=70, on_cpu=True, expect=FEEDS,
    expect_cpu={"feeds_ratio": at_least(0.02, "two cores decode and compute"), "data_wait_share": at_most(1)},
)  # fmt: skip
def jpegs_feed(work: Work) -> dict[str, Any]:
    """The loader's workers decode as fast as the model trains: ResNet-50 at 224 pixels on a GPU"""
    if work.on_gpu:
        size, shape = 2048, ("--model=resnet50", "--image-size=224", "--batch-size=128", "--max-steps=60")
    else:
        size, shape = (
            64,
            ("--model=resnet18", "--image-size=32", "--batch-size=4", "--max-steps=12", "--train-num-workers=1"),
        )
    folder = make_images(work.scratch / "images", size)
    common = (*shape, "--epochs=100", "--warmup-steps=0", "--lr=0.001", "--blocking-save")
    bare = work.train("single", *common, "--data=synthetic", f"--num-samples={size}", name="bare").summary()
    fed = work.train("single", *common, f"--data=imagefolder:{folder}", name="fed").summary()
    return {
        "feeds_ratio": fed["images_per_second"] / bare["images_per_second"],
        "data_wait_share": fed["data_wait_share"],
        "images_per_second": fed["images_per_second"],
        "images_per_second_synthetic": bare["images_per_second"],
    }


SYNCHRONISES = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
)


def waits(run: Path, num_steps: int) -> dict[str, Any]:
    """The waits for the GPU and the copies to it, in the trace of a run's steps."""
    with gzip.open(run / "profile" / "rank-0.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    names = [event["name"] for event in events]
    steps = [event for event in events if event["name"].startswith("step ") and event.get("cat") == "user_annotation"]
    if not steps:
        raise RuntimeError(f"no steps in the trace, which has {sorted(set(names))[:50]}")
    begin = min(event["ts"] for event in steps)
    end = max(event["ts"] + event["dur"] for event in steps)
    inside = [event["name"] for event in events if begin <= event["ts"] <= end]
    synchronised = [name for name in inside if name in SYNCHRONISES]
    return {
        "num_steps": len(steps),
        "waits_per_step": len(synchronised) / num_steps,
        "pageable_copies": sum("Pageable" in name and "HtoD" in name for name in inside),
        "pinned_copies": sum("Pinned" in name and "HtoD" in name for name in inside),
        "kinds": {name: synchronised.count(name) for name in set(synchronised)},
    }


NO_WAITS = {
    "waits_per_step": at_most(1, "the one that is meant: losses of steps before, by an event"),
    "pageable_copies": exactly(0, "a copy from pageable memory waits for all that went before"),
    "num_steps": at_least(3),
}
TRACED = {"waits_per_step": exactly(0, "no GPU"), "num_steps": at_least(3)}


def traced(work: Work, *options: str) -> dict[str, Any]:
    """The figures of a training with a trace of some of its steps."""
    # Ten steps warm up, then five are traced.
    length = ("--epochs=100", f"--max-steps={30 if work.on_gpu else 16}", "--log-every=10")
    summary = work.train("single", *options, *length, "--profile").summary()
    return waits(work.scratch / "run", summary["profile_steps"])


@case(part="C", timeout_s=30, on_cpu=True, expect=NO_WAITS, expect_cpu=TRACED)
def no_waits_synthetic(work: Work) -> dict[str, Any]:
    """No synchronisation in a step, on images that are made on the GPU (G6)"""
    return traced(work, "--model=resnet18", "--data=synthetic", "--image-size=32", "--batch-size=4", "--num-samples=80")


@case(part="C", timeout_s=30, on_cpu=True, expect=NO_WAITS, expect_cpu=TRACED)
def no_waits_tokens(work: Work) -> dict[str, Any]:
    """No synchronisation in a step, on tokens that are mapped from a file: copies come from pinned memory"""
    from benchmarks.gpu.correctness import TOKENS

    return traced(work, *TOKENS, "--clip-norm=1")


@case(part="C", timeout_s=30, expect={**NO_WAITS, "pinned_copies": at_least(1)})
def no_waits_jpegs(work: Work) -> dict[str, Any]:
    """No synchronisation in a step, on JPEGs that workers decode: copies come from pinned memory"""
    folder = make_images(work.scratch / "images", 128)
    return traced(work, *IMAGES[:1], f"--data=imagefolder:{folder}", "--batch-size=16", "--train-num-workers=4")


@case(
    part="C", timeout_s=80, on_cpu=True,
    expect={
        "stall_share": at_most(0.03, "of the time, at one checkpoint a minute"),
        "num_checkpoints": at_least(2),
    },
    expect_cpu={"stall_share": at_most(0.2, "a machine that others use"), "num_checkpoints": at_least(2)},
)  # fmt: skip
def checkpoint_stall(work: Work) -> dict[str, Any]:
    """Checkpoints behind the training hold it up for little (G8)"""
    if work.on_gpu:
        options = ("--model=gpt-124m", "--data=synthetic", "--batch-size=8", "--num-samples=7200", "--save-every=0.1")
    else:
        options = (
            "--model=gpt-tiny",
            "--data=synthetic",
            "--seq-len=32",
            "--batch-size=4",
            "--max-steps=150",
            "--save-every=0.03",
        )
    ended = work.train("single", *options, "--epochs=1", "--log-every=5")
    summary = ended.summary()
    lines = ended.records("steps")[1:]
    wall_s = lines[-1]["seconds"] - lines[0]["seconds"]
    # Step times leave out the time between steps: the difference to the wall time is what checkpoints took.
    steps_s = (lines[-1]["step"] - lines[0]["step"]) * summary["step_time_s"]["p50"]
    saved = [line for line in ended.records("checkpoint") if lines[0]["step"] <= line["step"] < lines[-1]["step"]]
    if not saved:
        raise Skip("the training was over before its first checkpoint")
    stall_s = max(0.0, wall_s - steps_s) / len(saved)
    return {
        "stall_share": stall_s / 60,
        "stall_s": stall_s,
        "num_checkpoints": len(saved),
        "save_s": sum(line["save_s"] for line in saved) / len(saved),
    }
