"""The cost of asynchronous checkpoints: windows of steps with a checkpoint compared with windows without one.

    python benchmarks/checkpoints.py [--rounds 15] [--record]

At the start of a window a checkpoint of weights and moments begins, as in `train ddp` after an epoch: it is copied to
host memory while the steps wait, then planned, checked and written while they go on. A window ends when it is on disk.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from results import parser, publish, ratios, spread, table
from rounds import Turn, run, trainer_of

from muster.config import Options
from muster.train.checkpoint.manager import CheckpointManager, Progress
from muster.train.distributed.world import World

WITHOUT, BEHIND, BLOCKING, ALONE = "no checkpoint", "one, behind the steps", "one, waited for", "one, without steps"


def build(asked: argparse.Namespace, world: World) -> Mapping[str, Turn]:
    """The contenders, on one rank; all train the same model."""
    options = Options(model=asked.model, image_size=asked.image_size, max_steps=asked.steps).settled()
    loop = trainer_of(options, world)
    run = Path(asked.folder)
    managers = {
        name: CheckpointManager(run / name.replace(" ", "-"), world, keep=1, in_background=in_background)
        for name, in_background in ((BEHIND, True), (BLOCKING, False), (ALONE, True))
    }

    def turn(name: str) -> Turn:
        def train(number: int, num_steps: int) -> None:
            manager = managers.get(name)
            if manager is not None and number > 0:
                manager.save({"progress": {"step": number}, **loop.trained.state()}, number)
            done = 0
            while done < num_steps and name != ALONE:  # an epoch of the digits is shorter than a window
                loop.progress = Progress(epoch=number + done)
                loop.train_epoch()
                done += loop.sampler.num_steps
            if manager is not None:
                manager.wait()

        return train

    return {name: turn(name) for name in (WITHOUT, BEHIND, BLOCKING, ALONE)}


def main() -> None:
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--model", default="resnet18", help="default: %(default)s")
    options.add_argument("--image-size", type=int, default=64, help="default: %(default)s")
    options.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    options.add_argument("--steps", type=int, default=44, help="of a window (default: %(default)s)")
    options.add_argument("--folder", help="where the checkpoints go. Default: a temporary one")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        asked.folder = folder
        seconds = run(build, asked)
    rows = []
    for name, own in seconds.items():
        ratio = ratios(own, seconds[WITHOUT])
        middle = statistics.quantiles(ratio, n=4)
        rows.append([name, spread(own, 2), spread(ratio), f"{middle[0]:.3f} to {middle[2]:.3f}"])
    header = ["window", "seconds, median (range)", "against no checkpoint", "middle half of the ratios"]
    title = f"Checkpoints: {asked.model} at {asked.image_size} px, {asked.ranks} gloo ranks, {asked.rounds} rounds of "
    publish(f"{title}windows of {asked.steps} steps", table(header, rows), record=asked.record)


if __name__ == "__main__":
    main()
