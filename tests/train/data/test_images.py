"""Decoding of image files: crops decoded no larger than needed, and nvJPEG, which takes whole batches."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms.v2.functional import resized_crop

from muster.config import Options
from muster.errors import MusterError
from muster.train import data
from muster.train.data import images as image_files, nvjpeg
from muster.train.data.images import (
    JPEG,
    SCALES,
    Crop,
    centre_crop,
    decode,
    decode_crop,
    random_crop,
    resize,
    scale_of,
)
from muster.train.data.loader import open_batches
from muster.train.data.sampler import generator
from muster.train.distributed.world import World

ROOT = Path(__file__).parents[3]


def photograph(height: int, width: int, kind: str = "jpeg", mode: str = "RGB") -> bytes:
    """A file with smooth shades, as photographs have."""
    grid = torch.rand(3, 5, 7, generator=generator(0, height, width))
    shades = torch.nn.functional.interpolate(grid[None], (height, width), mode="bicubic")[0].clamp(0, 1).mul(255)
    file = io.BytesIO()
    Image.fromarray(shades.byte().permute(1, 2, 0).numpy()).convert(mode).save(file, kind, quality=92)
    return file.getvalue()


def test_on_a_gpu_pixels_are_resized_as_floats(monkeypatch):
    # torch has no kernel for antialiased resizing of bytes there. The meta device stands for the GPU.
    given = []

    def interpolate(pixels, size, **options):
        given.append((pixels.dtype, options["antialias"]))
        return pixels.new_empty((*pixels.shape[:2], *size))

    monkeypatch.setattr(torchvision.transforms.v2.functional._geometry, "interpolate", interpolate)
    pixels_CHW = torch.empty(3, 40, 60, dtype=torch.uint8, device="meta")
    resized_CHW = resize(pixels_CHW, Crop(0, 0, 30, 30, True), 8)
    assert given == [(torch.float32, True)]
    assert (resized_CHW.dtype, resized_CHW.shape) == (torch.uint8, (3, 8, 8))


def test_random_crops_are_within_the_image_and_of_the_wanted_shape():
    torch.manual_seed(0)
    crops = [random_crop(375, 500) for _ in range(2000)]
    shares = [crop.height * crop.width / (375 * 500) for crop in crops]
    assert all(crop.top + crop.height <= 375 and crop.left + crop.width <= 500 for crop in crops)
    assert all(min(crop.top, crop.left) >= 0 for crop in crops)
    assert 0.345 < min(shares) < 0.37
    assert max(shares) > 0.9
    assert all(0.74 < crop.width / crop.height < 1.35 for crop in crops)
    assert 900 < sum(crop.flip for crop in crops) < 1100
    assert {crop.top == 0 for crop in crops} == {True, False}


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 900), (900, 1), (3, 400), (400, 3)])
def test_long_images_give_their_middle(height, width):
    for crop in (random_crop(height, width), centre_crop(height, width)):
        assert 1 <= crop.height <= height
        assert 1 <= crop.width <= width
        assert crop.top + crop.height <= height
        assert crop.left + crop.width <= width
        assert abs(2 * crop.top + crop.height - height) <= 1
        assert abs(2 * crop.left + crop.width - width) <= 1


def test_no_crop_is_decoded_smaller_than_it_is_wanted():
    torch.manual_seed(1)
    seen = set()
    for size in (8, 24, 64, 224):
        for height, width in ((375, 500), (1200, 800), (100, 90), (31, 2000)):
            for _ in range(20):
                crop = random_crop(height, width)
                scale = scale_of(crop, size)
                seen.add(scale)
                assert scale == 1 or min(crop.height // scale, crop.width // scale) >= size
                assert scale == SCALES[0] or min(crop.height, crop.width) < 2 * scale * size
    assert seen == {1, *SCALES}


@pytest.mark.parametrize(("kind", "mode"), [("jpeg", "RGB"), ("jpeg", "L"), ("jpeg", "CMYK"), ("png", "RGB")])
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_a_crop_is_what_cropping_the_whole_image_gives(kind, mode, scale):
    content, size = photograph(403, 501, kind, mode), 44
    crop = Crop(19, 33, size * scale + 3, size * scale + 5, flip=scale == 2)
    found = decode_crop(content, size, lambda height, width: crop)
    expected = resized_crop(decode(content), *crop[:4], [size, size], antialias=True)
    expected = expected.flip(-1) if crop.flip else expected
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (3, size, size))
    apart = (found.int() - expected.int()).abs()
    assert apart.float().mean() < (0.6 if scale == 1 else 2.0)
    assert apart.max() <= (1 if scale == 1 else 12)
    # A crop of another place has very different shades.
    wrong = resized_crop(decode(content), 150, 150, *crop[2:4], [size, size], antialias=True)
    assert (found.int() - wrong.int()).abs().float().mean() > 5


def test_a_small_crop_of_a_jpeg_is_not_decoded_whole(monkeypatch):
    monkeypatch.setattr(image_files, "decode", None)
    assert decode_crop(photograph(400, 400), 32, centre_crop).shape == (3, 32, 32)
    with pytest.raises(TypeError):
        decode_crop(photograph(400, 400), 300, centre_crop)


def options(root, **more) -> Options:
    return Options(data=f"imagefolder:{root}", image_size=24, batch_size=4, **more)


def batches(asked: Options) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The batches of training and those of validation."""
    opened = open_batches(data.open_source(asked), asked, World())
    try:
        return [list(part) for part in opened]
    finally:
        for part in opened:
            part.close()


@pytest.fixture
def decoded(monkeypatch):
    """Replaces nvJPEG with the CPU's decoder, as there is no GPU here; all other code is that for GPUs."""
    taken = []

    def decode_jpeg(files, mode, device):
        taken.append(len(files))
        if not all(file[:3].numpy().tobytes() == JPEG for file in files):
            raise RuntimeError("nvjpegDecodeBatched failed: 3")
        return [decode(file.numpy().tobytes()) for file in files]

    monkeypatch.setattr(nvjpeg, "decode_jpeg", decode_jpeg)
    monkeypatch.setattr(nvjpeg, "check", lambda options, samples, device: samples)
    return taken


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_for_the_gpu_have_the_same_crops(tmp_path, make_images, decoded, num_workers):
    root = make_images(tmp_path / "images", per_class=8)
    workers = {"train_num_workers": num_workers, "valid_num_workers": num_workers}
    for one, other in zip(batches(options(root)), batches(options(root, decoder="nvjpeg", **workers)), strict=True):
        assert len(one) == len(other) > 0
        for (images, labels), (their_images, their_labels) in zip(one, other, strict=True):
            assert torch.equal(labels, their_labels)
            assert torch.equal(images, their_images)
            assert images.stride() == their_images.stride()
    assert decoded == [4, 4, 4, 2]


def test_a_file_that_nvjpeg_can_not_decode_is_told(tmp_path, make_images, decoded):
    root = make_images(tmp_path / "train", per_class=4)
    make_images(tmp_path / "val", per_class=4)
    Image.new("RGB", (30, 30)).save(root / "cat" / "001.png")
    (root / "cat" / "001.jpg").unlink()
    with pytest.raises(MusterError, match="nvjpegDecodeBatched failed") as raised:
        batches(options(tmp_path, decoder="nvjpeg"))
    assert "--decoder=cpu" in raised.value.fix


@pytest.mark.parametrize(
    ("more", "words"), [({}, "GPUs only"), ({"on_bad_sample": "skip"}, "can't replace a bad sample")]
)
def test_what_nvjpeg_can_not_do_is_refused(tmp_path, make_images, more, words):
    with pytest.raises(MusterError, match=words) as raised:
        batches(options(make_images(tmp_path / "images"), decoder="nvjpeg", **more))
    assert "--decoder=nvjpeg" in raised.value.seen
    assert "--decoder=cpu" in raised.value.fix
    assert raised.value.code == 2
    with pytest.raises(MusterError, match="no image files"):
        batches(Options(data="digits", decoder="nvjpeg"))


@pytest.mark.process
def test_training_on_tokens_loads_nothing_for_images(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 30)
    for name in ("torchvision", "PIL"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('loaded, and not needed')")
    arguments = ("--model=gpt-tiny", f"--data=tokens:{tmp_path}/text.txt", "--seq-len=8", "--batch-size=2")
    command = [sys.executable, "-m", "muster.train", "single", *arguments, "--max-steps=1", f"--runs-dir={tmp_path}"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "loaded, and not needed" not in done.stdout + done.stderr


@pytest.mark.process
def test_large_images_and_palettes_are_read_without_a_warning(train, make_images, tmp_path):
    folder = make_images(tmp_path / "images")
    for path in (folder / "cat").iterdir():
        Image.open(path).quantize(16).save(path.with_suffix(".png"), transparency=bytes(16))
        path.unlink()
    argv = ["single", f"--data=imagefolder:{folder}", "--image-size=16", "--batch-size=8", "--max-steps=1"]
    limit = "from PIL import Image\nImage.MAX_IMAGE_PIXELS = 1000"  # PIL warns of more, and refuses twice as many
    (ended,) = train([*argv, f"--runs-dir={tmp_path}"], ok=True, before=limit)
    assert ended.err == ""
