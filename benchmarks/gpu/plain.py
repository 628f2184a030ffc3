"""Plain PyTorch loops, as users write them: the speed of our training is compared with theirs.

    python -m benchmarks.gpu.plain resnet|timm|jpegs|gpt --model resnet50 --batch-size 128 --steps 60 [--compile]

Images are one batch that stays on the device, or JPEGs read as in torchvision's reference scripts; tokens are drawn as
in nanoGPT. All use bf16 autocast and fused optimizers, images also channels_last; the loss is read every tenth step.
Prints a JSON object: samples per second, peak memory, seconds to the first step.
"""

# ruff: noqa: E402

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

STARTED = time.perf_counter()

import torch
from torch.nn.functional import cross_entropy

LOG_STEPS = 10


def image_step(asked: argparse.Namespace, device: torch.device) -> Callable[[], torch.Tensor]:
    """A step of a classifier of images, torchvision's or timm's."""
    if asked.kind == "timm":
        import timm

        model = timm.create_model(asked.model, num_classes=1000)
    else:
        import torchvision

        model = torchvision.models.get_model(asked.model)
    model = model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    batches = images_of(asked, device)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4, **fused)
    run = torch.compile(model) if asked.compile else model

    def step() -> torch.Tensor:
        inputs, labels = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(run(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def images_of(asked: argparse.Namespace, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images without end: the same one, or JPEGs of the folder `--data`, cropped and decoded by workers."""
    if asked.kind != "jpegs":
        inputs = torch.randn(asked.batch_size, 3, asked.image_size, asked.image_size, device=device)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (asked.batch_size,), device=device)
        while True:
            yield inputs, labels
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    into_tensor = (transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    crop = transforms.RandomResizedCrop(asked.image_size)
    images = datasets.ImageFolder(
        asked.data, transforms.Compose([crop, transforms.RandomHorizontalFlip(), *into_tensor])
    )
    loader = DataLoader(
        images, asked.batch_size, shuffle=True, drop_last=True, num_workers=asked.num_workers,
        pin_memory=device.type == "cuda", persistent_workers=True,
    )  # fmt: skip
    while True:
        for inputs, labels in loader:
            inputs = inputs.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield inputs, labels.to(device, non_blocking=True)


def token_step(asked: argparse.Namespace, device: torch.device) -> Callable[[], torch.Tensor]:
    """A step of nanoGPT's loop around our transformer: the same work as ours."""
    from muster.config import Options
    from muster.train import models

    options = Options(model=asked.model, vocab_size=asked.vocab_size, seq_len=asked.seq_len).settled()
    model = models.place(
        models.build(options, asked.vocab_size, asked.seq_len), device, torch.preserve_format, 0
    ).train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if asked.compile else model
    text_N = torch.randint(0, asked.vocab_size, (1_000_000,))

    def step() -> torch.Tensor:
        starts = torch.randint(len(text_N) - asked.seq_len, (asked.batch_size,)).tolist()
        texts_NT = torch.stack([text_N[start : start + asked.seq_len + 1] for start in starts])
        if device.type == "cuda":
            texts_NT = texts_NT.pin_memory().to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(run(texts_NT[:, :-1].contiguous()).flatten(0, -2), texts_NT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=("resnet", "timm", "jpegs", "gpt"))
    options.add_argument("--device", default="cuda")
    options.add_argument("--model", required=True)
    for name, default in (
        ("batch-size", 8),
        ("image-size", 224),
        ("seq-len", 1024),
        ("vocab-size", 50304),
        ("steps", 60),
        ("num-workers", 4),
    ):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--data", help="a folder of images in classes, for jpegs")
    options.add_argument("--compile", action="store_true")
    asked = options.parse_args()
    device = torch.device(asked.device)
    torch.backends.cudnn.benchmark = True
    step = (token_step if asked.kind == "gpt" else image_step)(asked, device)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step()
    synchronise()
    first_s = time.perf_counter() - STARTED
    seconds, lasted = list[float](), time.perf_counter()
    for number in range(1, asked.steps):
        loss = step()
        if number % LOG_STEPS == 0:
            loss.item()
            now = time.perf_counter()
            seconds.append((now - lasted) / LOG_STEPS)
            lasted = now
    print(json.dumps({
        "samples_per_second": asked.batch_size / statistics.median(seconds[1:] or seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "first_step_s": first_s,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
