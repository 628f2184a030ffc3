"""How fast data are loaded: training on JPEG files compared with the loader alone and with training on synthetic data.

    python benchmarks/data.py [--rounds 15] [--record]

Three measurements, on files made for them (500 x 375 pixels, shades with noise, quality 90): (a) images per second of
training on the files, of the loader alone, and of training on synthetic data, in turns in the same processes. The
result is the first rate divided by the slower of the other two. On CPUs the loader and the model share the cores, so
that at best 1/files = 1/loader + 1/synthetic. (b) The loader alone on tar shards, compared with the folder from which
they were packed. (c) Images decoded per second of one core's CPU time.
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from results import parser, publish, ratios, spread, table
from rounds import Turn, run, trainer_of
from torchvision import transforms
from torchvision.transforms import v2

from muster.config import Options
from muster.train.checkpoint.manager import Progress
from muster.train.data.images import decode, decode_crop, random_crop
from muster.train.data.pack import pack
from muster.train.distributed.world import World
from muster.train.trainer import Trainer

HEIGHT, WIDTH = 375, 500
TRAINING, LOADER, SYNTHETIC = "training on JPEG files", "the loader alone", "training on synthetic data"
FOLDER, SHARDS = "folder", "tar shards"
CASES = [("resnet50", 224, 8, 6), ("resnet18", 64, 32, 10)]
"""Model, pixels, batch of one rank, steps in one round."""

RANKS = 2
IMAGES = 640
DECODED = 150


def make_images(root: Path, num_images: int) -> None:
    """Fills `root`/train and a small `root`/val with JPEG files of ten classes."""
    drawn = np.random.default_rng(0)
    down, right = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    for number in range(num_images + 40):
        rates, phases = drawn.uniform(0.005, 0.05, (2, 3)), drawn.uniform(0, 6, (2, 3))
        waves = (
            np.sin(right[..., None] * rates[0] + phases[0]) * 60 + np.cos(down[..., None] * rates[1] + phases[1]) * 50
        )
        small = Image.fromarray(drawn.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8))
        blobs = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32) - 128
        pixels = 128 + waves + 0.4 * blobs + drawn.normal(0, 6, (HEIGHT, WIDTH, 3))
        folder = root / ("train" if number < num_images else "val") / f"class{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05}.jpg", quality=90)


def training(loop: Trainer) -> Turn:
    """Trains, as `train ddp` does."""

    def train(number: int, num_steps: int) -> None:
        loop.progress = Progress(epoch=number)
        loop.train_epoch()

    return train


def loading(loop: Trainer) -> Turn:
    """Loads the same batches, and does nothing with them."""

    def load(number: int, num_steps: int) -> None:
        loop.train.sampler.set_epoch(number, max_steps=num_steps)  # type: ignore[union-attr]
        for _ in islice(loop.train, num_steps):
            pass

    return load


def options_of(asked: argparse.Namespace, source: str) -> Options:
    """The defaults, with the sizes that were asked for."""
    samples = {"num_samples": asked.steps * asked.batch_size * asked.ranks, "num_classes": 10}
    return Options(
        data=source,
        model=asked.model,
        image_size=asked.image_size,
        batch_size=asked.batch_size,
        max_steps=asked.steps,
        **samples,
    ).settled()


def keeping_up(asked: argparse.Namespace, world: World) -> Mapping[str, Turn]:
    """The contenders of (a), on one rank."""
    folder = f"imagefolder:{asked.folder}/images"
    return {
        TRAINING: training(trainer_of(options_of(asked, folder), world)),
        LOADER: loading(trainer_of(options_of(asked, folder), world)),
        SYNTHETIC: training(trainer_of(options_of(asked, "synthetic"), world)),
    }


def sources(asked: argparse.Namespace, world: World) -> Mapping[str, Turn]:
    """The contenders of (b), on one rank."""
    return {
        name: loading(trainer_of(options_of(asked, source), world))
        for name, source in (
            (FOLDER, f"imagefolder:{asked.folder}/images"),
            (SHARDS, f"shards:{asked.folder}/shards"),
        )
    }


def case(asked: argparse.Namespace, model: str, image_size: int, batch_size: int, steps: int) -> argparse.Namespace:
    """`asked`, with the sizes of one case."""
    sizes = {"model": model, "image_size": image_size, "batch_size": batch_size, "steps": steps, "ranks": RANKS}
    return argparse.Namespace(**vars(asked) | sizes)


def middle_half(figures: list[float]) -> str:
    """The quartiles between which the middle half of `figures` lies."""
    middle = statistics.quantiles(figures, n=4) if len(figures) > 1 else figures * 3
    return f"{middle[0]:.3f} to {middle[2]:.3f}"


def report_keeping_up(asked: argparse.Namespace) -> list[str]:
    """The tables of (a)."""
    lines = []
    for sizes in CASES:
        one = case(asked, *sizes)
        seconds = run(keeping_up, one)
        slower = [max(pair) for pair in zip(seconds[LOADER], seconds[SYNTHETIC], strict=True)]
        both = [sum(pair) for pair in zip(seconds[LOADER], seconds[SYNTHETIC], strict=True)]
        num_images = one.steps * one.batch_size * RANKS
        rows = [[name, spread([num_images / taken for taken in own], 1)] for name, own in seconds.items()]
        ratio, best = ratios(slower, seconds[TRAINING]), ratios(slower, both)
        lines += [
            *table(
                [f"{one.model} at {one.image_size} px, {RANKS} x {one.batch_size}", "images/s, median (range)"], rows
            ),
            "",
            f"Training on JPEG files against the slower of the two: {spread(ratio)}, middle half {middle_half(ratio)}; "
            f"what taking turns on the same cores leaves at best: {spread(best)}.",
            "",
        ]
    return lines


def report_sources(asked: argparse.Namespace) -> list[str]:
    """The table of (b)."""
    rows = []
    for image_size in (224, 64):
        one = case(asked, "resnet18", image_size, 32, 10)
        seconds = run(sources, one)
        rates = {name: [640 / taken for taken in own] for name, own in seconds.items()}
        ratio = ratios(rates[SHARDS], rates[FOLDER])
        rows.append(
            [f"{image_size} px", *(spread(rates[name], 1) for name in rates), spread(ratio), middle_half(ratio)]
        )
    header = ["the loader alone, images/s", FOLDER, SHARDS, "ratio of each round", "middle half of the ratios"]
    return [*table(header, rows), ""]


def decoders(size: int) -> dict[str, Callable[[bytes], Any]]:
    """Ways from a file to a training image, by name."""
    share = {"scale": (0.35, 1.0), "antialias": True}
    plain = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, **share),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    whole = v2.Compose([v2.RandomResizedCrop(size, **share), v2.RandomHorizontalFlip()])
    return {
        "PIL, torchvision's transforms, fp32": lambda content: plain(Image.open(io.BytesIO(content)).convert("RGB")),
        "torchvision's decoder, v2, uint8": lambda content: whole(decode(content)),
        "this": lambda content: decode_crop(content, size, random_crop),
    }


def report_decoders(asked: argparse.Namespace) -> list[str]:
    """The table of (c)."""
    torch.set_num_threads(1)
    files = [path.read_bytes() for path in sorted(Path(asked.folder, "images", "train").glob("*/*"))[:DECODED]]
    rows = []
    for size in (224, 64):
        rates: dict[str, list[float]] = {name: [] for name in decoders(size)}
        for number in range(-1, asked.rounds):
            for name, read in decoders(size).items():
                torch.manual_seed(number)
                started = time.process_time()
                for content in files:
                    read(content)
                if number >= 0:
                    rates[name].append(len(files) / (time.process_time() - started))
        for name, own in rates.items():
            rows.append([f"{size} px", name, spread(own, 0), spread(ratios(rates["this"], own))])
    return [*table(["to", "by", "images a second of a core, median (range)", "this against it"], rows), ""]


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "keeping-up": report_keeping_up,
    "sources": report_sources,
    "decoders": report_decoders,
}


def main() -> None:
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--only", choices=PARTS, help="one of the three (default: all)")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = folder
        make_images(Path(folder, "images"), IMAGES)
        pack(Path(folder, "images"), Path(folder, "shards"), shard_mb=10, seed=0)
        reports = [partial(report, asked) for name, report in PARTS.items() if asked.only in (None, name)]
        lines = [line for report in reports for line in report()]
    title = f"Data: JPEG files of {WIDTH} x {HEIGHT} pixels, {RANKS} gloo ranks, {asked.rounds} rounds"
    publish(title, lines[:-1], record=asked.record)


if __name__ == "__main__":
    main()
