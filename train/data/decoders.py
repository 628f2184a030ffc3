"""Decoders that take whole batches of image files: nvJPEG by torchvision, on the GPU, and DALI, on either."""

from importlib import import_module
from typing import Any, Protocol

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from train.data.encoded import Encoded
from train.data.images import Source
from train.data.pictures import resize
from train.data.reader import Raw
from train.errors import FAILED, MusterError
from train.options import Options


class Decoder(Protocol):
    """From files to images of one size, on the device."""

    def __call__(self, raw: Raw) -> torch.Tensor:
        """The crops of the images (NCHW, uint8).

        Raises:
            MusterError: one can't be decoded.
        """
        ...


def refuse_unfit(options: Options, source: Source, device: torch.device) -> None:
    """Returns where `--decoder` can decode these data on this device.

    Raises:
        MusterError: it can't.
    """
    seen, fix = f"--decoder={options.decoder}", "--decoder=cpu, or leave it out"
    if options.decoder == "cpu":
        return
    if not isinstance(source.train, Encoded):
        wrong = "there are no image files to decode"
        raise MusterError(wrong, seen=f"{seen} --data={options.data}", fix=f"{fix}; or imagefolder or shards")
    if options.on_bad_sample == "skip":
        wrong = "workers that don't decode can't put another sample in the place of a bad one"
        raise MusterError(wrong, seen=f"{seen} --on-bad-sample=skip", fix=f"{fix}; or without --on-bad-sample")
    if options.decoder == "nvjpeg" and device.type != "cuda":
        raise MusterError("nvJPEG decodes on GPUs only", seen=f"{seen}, training on the CPU", fix=fix)
    if options.decoder == "dali":
        try:
            import_module("nvidia.dali")
        except ImportError as error:
            fix = "pip install nvidia-dali-cuda130 (nvidia-dali-cuda120 for CUDA 12), or --decoder=cpu"
            raise MusterError("DALI is not installed", seen=f"{seen}: {error}", fix=fix) from error


def decoder_for(options: Options, size: int, device: torch.device) -> Decoder | None:
    """What decodes on the device; None where the workers do."""
    if options.decoder == "cpu":
        return None
    return NvJpeg(size, device) if options.decoder == "nvjpeg" else Dali(size, options.batch_size, device)


def refuse_bad(name: str, reason: str, decoder: str) -> MusterError:
    """The error about a file that can't be decoded on the device."""
    fix = "mend or remove the file, or --decoder=cpu, which knows more kinds of files"
    return MusterError(f"a sample can't be decoded by {decoder}: {reason}", seen=name, fix=fix, code=FAILED)


class NvJpeg:
    """JPEG files by torchvision on the GPU, then crops, resized there."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device

    def __call__(self, raw: Raw) -> torch.Tensor:
        files = list(raw.contents.split(raw.lengths))
        try:
            pictures = self.decode(files)
        except RuntimeError:
            pictures = [self.decode_one(file, name) for file, name in zip(files, raw.names, strict=True)]
        return torch.stack([resize(part, crop, self.size) for part, crop in zip(pictures, raw.crops, strict=True)])

    def decode(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        """The images in `files`."""
        return decode_jpeg(files, mode=ImageReadMode.RGB, device=self.device)  # type: ignore[return-value]

    def decode_one(self, file: torch.Tensor, name: str) -> torch.Tensor:
        """The image in `file`, by which the bad one of a batch is found."""
        try:
            return self.decode([file])[0]
        except RuntimeError as error:
            raise refuse_bad(name, str(error).partition("\n")[0], "nvJPEG") from error


class Dali:
    """Any files that DALI knows, of which it decodes the crop alone, and resizes it.

    Source: https://docs.nvidia.com/deeplearning/dali/user-guide/docs/ (external_source, decoders.image_slice)
    """

    def __init__(self, size: int, batch_size: int, device: torch.device) -> None:
        # Its functions are made when it is imported: their types, where it has some, are no help.
        dali: Any = import_module("nvidia.dali")
        fn: Any = import_module("nvidia.dali.fn")
        on_gpu = device.type == "cuda"

        @dali.pipeline_def(
            batch_size=batch_size,
            num_threads=2,
            device_id=device.index if on_gpu else None,
            prefetch_queue_depth=1,
        )
        def pipeline() -> Any:
            files = fn.external_source(name="files")
            starts, shapes, flips = (fn.external_source(name=name) for name in ("starts", "shapes", "flips"))
            parts = fn.decoders.image_slice(
                files,
                starts,
                shapes,
                device="mixed" if on_gpu else "cpu",
                axes=[0, 1],
                normalized_anchor=False,
                normalized_shape=False,
                output_type=dali.types.RGB,
            )
            resized = fn.resize(parts, size=[size, size], antialias=True)
            return fn.transpose(fn.flip(resized, horizontal=flips), perm=[2, 0, 1])

        self.pipeline: Any = pipeline()
        self.pipeline.build()

    def __call__(self, raw: Raw) -> torch.Tensor:
        crops = raw.crops
        self.pipeline.feed_input("files", [file.numpy() for file in raw.contents.split(raw.lengths)])
        self.pipeline.feed_input("starts", [torch.tensor(crop[:2], dtype=torch.float32).numpy() for crop in crops])
        self.pipeline.feed_input("shapes", [torch.tensor(crop[2:4], dtype=torch.float32).numpy() for crop in crops])
        self.pipeline.feed_input("flips", [torch.tensor(crop.flip, dtype=torch.int32).numpy() for crop in crops])
        try:
            (images,) = self.pipeline.run()
        except RuntimeError as error:
            names = f"{raw.names[0]} or one of the {len(raw.names) - 1} after it in the batch"
            raise refuse_bad(names, str(error).strip().partition("\n")[0], "DALI") from error
        # A copy: the next batch is written where this one lies.
        return torch.from_dlpack(images.as_tensor()).clone()
