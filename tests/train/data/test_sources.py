import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from muster.config import Options, check_data
from muster.errors import MusterError
from muster.train import data
from muster.train.data import cifar10, digits, imagefolder
from muster.train.data.images import decode
from muster.train.data.loader import Reader, choose_workers, open_batches
from muster.train.data.sampler import Draw
from muster.train.data.source import BadSample, InMemory, split
from muster.train.data.synthetic import Synthetic
from muster.train.distributed.world import World


def seen(batches):
    """All that `batches` yield, as one tensor of images and one of labels."""
    pairs = list(batches)
    return torch.cat([images for images, _ in pairs]), torch.cat([labels for _, labels in pairs])


@pytest.fixture
def loaded():
    """Opens the batches of options, and ends their workers after the test."""
    opened = []

    def load(options, world=None):
        opened.extend(open_batches(data.open_source(options), options, world or World()))
        return tuple(opened[-2:])

    yield load
    for batches in opened:
        batches.close()


def test_split_is_disjoint_and_the_same_for_all():
    train, valid = split(100, 0.2, 3)
    assert sorted(train + valid) == list(range(100))
    assert len(valid) == 20
    assert split(100, 0.2, 3) == (train, valid)
    assert split(100, 0.2, 4) != (train, valid)
    assert len(split(3, 0.01, 0)[1]) == 1


def test_digits_are_the_real_ones(loaded):
    source = data.open_source(Options(data="digits", image_size=8))
    assert (len(source.train) + len(source.valid), source.num_classes) == (1797, 10)
    train, _ = loaded(Options(data="digits"))
    images, labels = seen(train)
    assert images.shape == (44 * 32, 3, 32, 32)
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1
    assert set(labels.tolist()) == set(range(10))


def test_digits_are_those_of_scikit_learn():
    for read, expected in zip(digits.read(), load_digits(return_X_y=True), strict=True):
        np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("mode", "suffix", "limit"),
    [("RGB", "jpg", 3), ("L", "jpg", 3), ("CMYK", "jpg", 0), ("RGB", "png", 0), ("P", "png", 0), ("RGBA", "webp", 0)],
)
def test_every_kind_of_image_is_decoded_as_by_pil(mode, suffix, limit):
    shades = np.linspace(0, 255, 48 * 64 * 3).astype(np.uint8).reshape(48, 64, 3)
    file = io.BytesIO()
    Image.fromarray(shades).convert(mode).save(file, {"jpg": "jpeg"}.get(suffix, suffix))
    expected = np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1)
    found = decode(file.getvalue())
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (3, 48, 64))
    # Two builds of libjpeg-turbo may round differently.
    assert np.abs(found.numpy().astype(int) - expected).max() <= limit


@pytest.mark.parametrize("suffix", ["png", "tiff", "ppm"])
def test_greys_of_16_bits_keep_their_shades(suffix):
    shades = np.linspace(0, 65535, 48 * 64).astype(np.uint16).reshape(48, 64)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, suffix)
    assert torch.equal(decode(file.getvalue()), torch.from_numpy((shades // 256).astype(np.uint8)).expand(3, -1, -1))


@pytest.mark.parametrize("type_", [np.float32, np.int32])
def test_pixels_whose_white_is_not_known_are_refused(type_):
    file = io.BytesIO()
    Image.fromarray(np.full((48, 64), 1000, type_)).save(file, "tiff")
    with pytest.raises(ValueError, match="8 or 16 bits"):
        decode(file.getvalue())


@pytest.mark.parametrize("seed", [0, 20261125173536, 10**30])
@pytest.mark.parametrize("name", ["synthetic", "fake"])
def test_made_up_data(name, seed, loaded):
    options = Options(data=name, image_size=16, num_classes=5, num_samples=40, batch_size=4, seed=seed)
    train, valid = loaded(options)
    images, labels = seen(train)
    assert images.shape == (40, 3, 16, 16)
    assert labels.max() < 5
    assert len(seen(valid)[1]) == 4
    again, _ = loaded(options)
    assert torch.equal(seen(again)[0], images)


@pytest.mark.parametrize("name", ["synthetic", "fake", "digits"])
def test_what_is_seen_does_not_depend_on_the_world_size(name, loaded):
    sizes = {"image_size": 8, "num_samples": 48, "num_classes": 5, "batch_size": 4, "data": name}
    one, _ = seen(loaded(Options(accumulate=2, **sizes))[0])
    parts = [seen(loaded(Options(**sizes), World(rank=rank, world_size=2))[0])[0] for rank in (0, 1)]
    two = torch.stack([part.view(-1, 4, 3, 8, 8) for part in parts], dim=1).flatten(0, 2)
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digit", "digits"),
        ("cifar10", "needs a folder"),
        ("digits:/x", "has no folder"),
        ("imagefolder:/does/not/exist", "does not exist"),
        ("imagefolder:~nobody-of-this-name/x", "does not exist"),
        ("shards:~nobody-of-this-name/x", "does not exist"),
        ("cifar10:/does/not/exist", "no complete CIFAR-10"),
    ],
)
def test_a_source_that_is_not_there(text, words):
    with pytest.raises(MusterError) as raised:
        data.open_source(Options(data=text))
    assert words in str(raised.value)
    assert text in raised.value.seen
    assert raised.value.code == 2


def test_nodes_with_different_files_of_one_name_are_refused(tmp_path):
    class TwoNodes(World):
        def gather(self, value):
            return [value and "90 train and 9 validate", value]  # None: no error on either rank

    (tmp_path / "x.txt").write_text("abcdefgh" * 200)
    options = Options(model="gpt-tiny", data=f"tokens:{tmp_path / 'x.txt'}", seq_len=16)
    with pytest.raises(MusterError, match="not all ranks have the same data") as raised:
        data.open_source(options, TwoNodes(hosts=("a", "b")))
    assert "90 train and 9 validate on a; " in raised.value.seen
    assert raised.value.seen.endswith(" validate on b")


def test_a_set_smaller_than_a_global_batch_says_the_numbers(loaded):
    with pytest.raises(MusterError) as raised:
        loaded(Options(data="fake", num_samples=60, batch_size=16), World(world_size=4))
    assert "60 training samples" in str(raised.value)
    assert "64" in str(raised.value)
    assert "smaller --batch-size" in raised.value.fix


def folder_options(root, **more):
    return Options(data=f"imagefolder:{root}", image_size=24, batch_size=4, **more)


def test_one_folder_is_split(tmp_path, make_images):
    source = data.open_source(folder_options(make_images(tmp_path / "a b", per_class=10)))
    assert (len(source.train), len(source.valid), source.num_classes) == (18, 2, 2)


@pytest.mark.parametrize("half", ["val", "valid", "validation"])
def test_two_folders_are_taken_as_they_are(tmp_path, make_images, half):
    make_images(tmp_path / "train", per_class=5)
    make_images(tmp_path / half, per_class=2)
    source = data.open_source(folder_options(tmp_path))
    assert (len(source.train), len(source.valid)) == (10, 4)


def test_images_are_those_of_torchvision_in_its_order(tmp_path, make_images, monkeypatch):
    root = make_images(tmp_path / "images")
    (root / "cat" / "more" / "still").mkdir(parents=True)
    for name in ("z.JPEG", "a.png", "none.txt"):
        (root / "cat" / "more" / name).touch()
        (root / "cat" / "more" / "still" / name).touch()
    elsewhere = make_images(tmp_path / "elsewhere")
    (root / "bird" / "linked").symlink_to(elsewhere / "cat")
    expected = ImageFolder(root)
    assert imagefolder.read_folder(root, "", []) == (expected.classes, expected.samples)
    # Except for files of macOS and of notebooks, which torchvision takes for images and classes.
    for name in ("cat/._a.png", "cat/.hidden/a.png", ".ipynb_checkpoints/a.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    assert imagefolder.read_folder(root, "", []) == (expected.classes, expected.samples)
    monkeypatch.chdir(root)
    assert imagefolder.read_folder(Path(), "", [])[0] == ["bird", "cat"]


def test_files_that_are_no_images_by_their_names_are_counted(tmp_path, make_images):
    for half in ("train", "val"):
        make_images(tmp_path / half)
        assert data.open_source(folder_options(tmp_path / half)).notes == ()
        for name in ("cat/loop.gif", "bird/more/b.avif", "cat/.hidden.gif"):
            (tmp_path / half / name).parent.mkdir(exist_ok=True)
            (tmp_path / half / name).touch()
    (note,) = data.open_source(folder_options(tmp_path)).notes
    assert note in [f"4 files left out: not named as images, {ends}" for ends in (".gif, .avif", ".avif, .gif")]


@pytest.mark.parametrize(("link", "to"), [("cat/self", "."), ("cat/up", ".."), ("cat/a/up", "..")])
def test_a_link_that_leads_back_is_named(tmp_path, make_images, link, to):
    root = make_images(tmp_path / "images")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(to)
    with pytest.raises(MusterError, match="leads back") as raised:
        data.open_source(folder_options(root))
    assert raised.value.seen == f"{root / link} -> {(root / link).resolve()}"


def test_a_link_to_itself_is_named(tmp_path, make_images):
    root = make_images(tmp_path / "images")
    (root / "cat" / "self").symlink_to("self")
    with pytest.raises(MusterError, match="can't be read") as raised:
        data.open_source(folder_options(root))
    assert raised.value.seen == str(root / "cat" / "self")


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("Imagefolder:my images", "--data='imagefolder:my images'"),
        ("imagefoldr", "--data=imagefolder:FOLDER"),
        ("sintetic", "--data=synthetic"),
    ],
)
def test_a_misspelt_source_is_told_with_its_folder(given, fix):
    with pytest.raises(MusterError, match="there is no data source called") as raised:
        check_data(given, "resnet18")
    assert (raised.value.seen, raised.value.fix) == (f"--data={given}", fix)


def test_folders_that_hold_no_data(tmp_path, make_images):
    def error(root):
        with pytest.raises(MusterError) as raised:
            data.open_source(folder_options(root))
        assert raised.value.code == 2
        return str(raised.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is empty" in error(empty)
    (empty / "a.jpg").touch()
    assert "no classes" in error(empty)
    (empty / "dog").mkdir()
    assert "no images in class dog" in error(empty)
    assert "is a file" in error(empty / "a.jpg")
    alone = error(make_images(tmp_path / "half" / "train").parent)
    assert "no val/" in alone
    assert f"or {tmp_path / 'half' / 'train'} as FOLDER" in alone
    assert "if that folder is a class, rename it" in alone
    assert "only one class" in error(make_images(tmp_path / "one", classes=("cat",)))
    make_images(tmp_path / "two" / "train")
    make_images(tmp_path / "two" / "val", classes=("cat", "dog"))
    assert "bird, dog" in error(tmp_path / "two")


def test_many_classes_without_images_are_told_in_a_line_that_can_be_read(tmp_path, make_images):
    make_images(tmp_path, classes=("a", "b"))
    for number in range(300):
        (tmp_path / f"c{number:03}").mkdir()
        (tmp_path / f"c{number:03}" / "animated.gif").touch()
    with pytest.raises(MusterError, match="no images in class c000, c001, c002, c003, c004 and 295 more") as raised:
        data.open_source(folder_options(tmp_path))
    assert ".jpg" in raised.value.fix  # and not .gif, which torchvision doesn't take either


@pytest.mark.parametrize(
    "halves",
    [
        *(("Train", "Val"), ("Training", "Test"), ("training", "validation"), ("Training", "Testing")),
        *(("training_set", "test_set"), ("seg_train", "seg_test")),
    ],
)
def test_halves_under_other_names_are_no_classes(tmp_path, make_images, halves):
    """If accepted, each image would have the class Train or Val, and the training would seem to succeed."""
    if halves == ("training_set", "test_set"):
        make_images(tmp_path / "single_prediction")
    for half in halves:
        make_images(tmp_path / half)
    with pytest.raises(MusterError, match="would be mixed") as raised:
        data.open_source(folder_options(tmp_path))
    assert all(half in raised.value.seen for half in halves)


@pytest.mark.parametrize("classes", [("Train", "Ship"), ("express train", "test tube"), ("test", "other")])
def test_classes_may_be_trains_and_tests(tmp_path, make_images, classes):
    assert data.open_source(folder_options(make_images(tmp_path, classes=classes))).num_classes == 2


def test_augmentation_depends_on_sample_and_epoch_only(tmp_path, make_images, loaded):
    root = make_images(tmp_path / "images")
    alone, _ = loaded(folder_options(root))
    helped, _ = loaded(folder_options(root, train_num_workers=2))
    epochs = []
    for epoch in (0, 1):
        for batches in (alone, helped):
            batches.sampler.set_epoch(epoch)
        state = torch.get_rng_state()
        images, _ = seen(alone)
        assert torch.equal(torch.get_rng_state(), state)  # the model's random numbers are left alone
        assert torch.equal(seen(helped)[0], images)
        epochs.append(images)
    assert not torch.equal(*epochs)


BREAK = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path: path.write_text("these are not pixels"),
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture(params=BREAK)
def broken(request, tmp_path, make_images):
    """A folder with two halves, and a function that damages a training and a validation file once they were found."""
    for half in ("train", "val"):
        make_images(tmp_path / half, per_class=8)

    def harm():
        paths = [tmp_path / half / "cat" / "003.jpg" for half in ("train", "val")]
        for path in paths:
            BREAK[request.param](path)
        return [str(path) for path in paths]

    return tmp_path, harm


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_stops_and_is_named(broken, num_workers, loaded):
    root, harm = broken
    train, valid = loaded(folder_options(root, train_num_workers=num_workers, valid_num_workers=num_workers))
    for batches, path in zip((train, valid), harm(), strict=True):
        with pytest.raises(MusterError) as raised:
            seen(batches)
        assert path in raised.value.seen
        assert "--on-bad-sample=skip" in raised.value.fix
        assert len(str(raised.value).splitlines()) == 3
        assert " at 0x" not in str(raised.value)  # the address of an object in memory


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_is_replaced_in_training_and_left_out_in_validation(broken, num_workers, loaded):
    root, harm = broken
    workers = {"train_num_workers": num_workers, "valid_num_workers": num_workers}
    train, valid = loaded(folder_options(root, on_bad_sample="skip", **workers))
    paths = harm()
    images, _ = seen(train)
    assert len(images) == 16
    assert torch.equal(seen(train)[0], images)
    assert list(train.bad) == [paths[0]]
    assert len(seen(valid)[0]) == 15
    assert (valid.num_bad, list(valid.bad)) == (1, [paths[1]])


def test_nothing_but_bad_samples(tmp_path, make_images, loaded):
    root = make_images(tmp_path / "images", per_class=4)
    train, _ = loaded(folder_options(root, on_bad_sample="skip"))
    for path in root.glob("*/*"):
        path.write_text("no")
    with pytest.raises(MusterError, match="not one training sample") as raised:
        seen(train)
    assert raised.value.code == 1


def test_a_folder_that_may_not_be_read(tmp_path, make_images):
    root = make_images(tmp_path / "images")
    root.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(MusterError, match="can't be read"):
            data.open_source(folder_options(root))
    finally:
        os.seteuid(user)
        root.chmod(0o700)


def test_cifar10_from_a_folder(tmp_path, monkeypatch, loaded):
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    drawn = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = drawn.integers(0, 256, (4, 3072), dtype=np.uint8)
        (base / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 9]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    train, valid = loaded(Options(data=f"cifar10:{tmp_path}", batch_size=5))
    assert seen(train)[0].shape == (20, 3, 32, 32)
    assert seen(valid)[0].shape == (4, 3, 32, 32)
    assert torch.equal(seen(train)[0], seen(train)[0])
    assert choose_workers(train.source, torch.device("cuda"), cores=8) == 7  # where a GPU trains
    assert seen(loaded(Options(data=f"cifar10:{tmp_path}", batch_size=5, image_size=40))[1])[0].shape[-1] == 40


@pytest.mark.parametrize("size", [8, 32])
def test_cifar10_is_augmented_as_by_torchvision(size):
    image_CHW = torch.randint(1, 256, (3, size, size), dtype=torch.uint8)
    theirs = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])
    samples = cifar10.Augmented(image_CHW[None], torch.tensor([7]))
    for seed in range(30):
        torch.manual_seed(seed)
        expected = theirs(image_CHW)
        torch.manual_seed(seed)
        found, label = samples.read(0)
        assert torch.equal(found, expected)
        assert label == 7


def test_the_next_readable_sample_takes_the_place_of_one_that_cannot_be_read() -> None:
    class Damaged(InMemory):
        random = True  # so that samples are read one by one

        def read(self, index: int) -> tuple[torch.Tensor, int]:
            if index in (3, 4, 9):
                raise BadSample(f"image {index}", "cut off")
            return super().read(index)

    samples = Damaged(torch.zeros(10, 3, 2, 2, dtype=torch.uint8), torch.arange(10))
    batch = Reader(samples, seed=1, replace=True).__getitems__([Draw(number, 0) for number in (2, 3, 9)])
    assert batch.labels is not None
    assert batch.labels.tolist() == [2, 5, 0]
    assert [name for name, _ in batch.bad] == ["image 3", "image 4", "image 9"]
    batch = Reader(samples, seed=1, replace=False).__getitems__([Draw(number, 0) for number in (2, 3, 9)])
    assert batch.labels is not None
    assert batch.labels.tolist() == [2]


def test_synthetic_sequences_are_as_long_as_asked_for_and_their_targets_are_the_next_tokens():
    source = data.open_source(Options(model="gpt-tiny", data="synthetic", seq_len=12, vocab_size=50, num_samples=30))
    assert (len(source.train), len(source.valid)) == (30, 3)
    for part in (source.train, source.valid):
        inputs_NT, targets_NT = part.read_batch([0, 2])
        assert inputs_NT.shape == targets_NT.shape == (2, 12)
        assert torch.equal(inputs_NT[:, 1:], targets_NT[:, :-1])
    assert source.size == 12


def test_numbers_of_synthetic_samples_go_to_the_device_from_pinned_memory(monkeypatch):
    # A copy from any other memory waits for all work queued on the GPU, for which the meta device stands.
    pinned, make = [], torch.tensor

    def tensor(values, *, pin_memory=False, **options):
        pinned.append((pin_memory, torch.device(options.get("device") or "cpu").type))
        return make(values, **options)

    source = data.open_source(Options(data="synthetic", image_size=8, batch_size=2, num_samples=20))
    assert isinstance(source.train, Synthetic)
    samples = source.train.to(torch.device("meta"))
    monkeypatch.setattr(torch, "tensor", tensor)
    images_NCHW, labels_N = samples.read_batch([3, 4, 5])
    assert pinned == [(True, "cpu")]
    assert {images_NCHW.device.type, labels_N.device.type} == {"meta"}
