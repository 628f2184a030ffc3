"""The options that say what is trained on what: the first part of those in options.py. Without torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

MODEL, DATA, TRAINING, SPEED, RUN = "Model", "Data", "Training", "Speed", "Run"
STRATEGY = "Strategy"


def option(*names: str, help: str, panel: str, **limits: Any) -> Any:
    """A typer option under the heading `panel` of the help text."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A model, and its data."""

    model: Annotated[
        str,
        option(
            help="Any classification model of torchvision (resnet18, resnet50, vit_b_16 ...), or a transformer that "
            "predicts the next token: gpt-tiny, gpt-small, gpt-124m, gpt-1b, gpt-8b.",
            panel=MODEL,
        ),
    ] = "resnet18"
    activation_checkpoint: Annotated[
        Literal["none", "selective", "full"],
        option(
            help="What a transformer's layers compute again in the backward pass, to save memory: nothing, all but "
            "matrix products and attention, or all.",
            panel=MODEL,
        ),
    ] = "none"
    data: Annotated[
        str,
        option(
            help="Images: synthetic, fake, digits, cifar10:FOLDER, imagefolder:FOLDER or shards:FOLDER (tar files as "
            "webdataset's, made by 'train pack'). Tokens: synthetic, or tokens:PATH of a text, of a folder with texts "
            "(both as bytes), or of a .bin, .u16, .u32 or .npy file.",
            panel=DATA,
        ),
    ] = "digits"
    image_size: Annotated[
        int | None, option(help="Pixels a side. Default: 32 for digits and cifar10, else 224.", panel=DATA, min=8)
    ] = None
    seq_len: Annotated[
        int | None, option(help="Tokens of a sequence. Default: the model's context.", panel=DATA, min=2)
    ] = None
    vocab_size: Annotated[
        int | None,
        option(help="Different tokens. Default: 256 of bytes, else as many as the file shows.", panel=DATA, min=2),
    ] = None
    num_classes: Annotated[int, option(help="Classes of the synthetic and fake data.", panel=DATA, min=2)] = 1000
    num_samples: Annotated[
        int, option(help="Training samples of the synthetic and fake data; a tenth more validates.", panel=DATA, min=1)
    ] = 1280
    train_num_workers: Annotated[
        int | None,
        option(
            help="Processes that load training data, for each rank; 0 loads in the trainer. Default: none on CPUs and "
            "for data in memory, else its share of the cores, up to 16.",
            panel=DATA,
            min=0,
        ),
    ] = None
    valid_num_workers: Annotated[
        int | None,
        option(help="Processes that load validation data, for each rank. Default: as for training.", panel=DATA, min=0),
    ] = None
    decoder: Annotated[
        Literal["cpu", "nvjpeg", "dali"],
        option(
            help="What decodes image files: the loader's workers, the GPU by nvJPEG (JPEGs only), or DALI, if it is "
            "installed.",
            panel=DATA,
        ),
    ] = "cpu"
    stage_to: Annotated[
        str | None,
        option(
            help="A folder on each node's own disk ('$TMPDIR') to which the data are copied first, once a node; a copy "
            "that is there already is used.",
            panel=DATA,
        ),
    ] = None
    on_bad_sample: Annotated[
        Literal["stop", "skip"], option(help="What a sample that can't be read does to the run.", panel=DATA)
    ] = "stop"
