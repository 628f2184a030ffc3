"""Token files: formats, halves, each token predicted once, and a transformer that learns this repository's sources."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.train import data, models
from muster.train.checkpoint import manager as checkpoint
from muster.train.data.loader import open_batches
from muster.train.distributed.world import World
from muster.train.models import IGNORED
from muster.train.parallel.strategy import loss_of

ROOT = Path(__file__).parents[3]


def options(path, **more):
    return Options(model="gpt-tiny", data=f"tokens:{path}", **{"seq_len": 4, "batch_size": 2, **more})


def write(path, numbers, type_):
    np.array(numbers, dtype=type_).tofile(path)
    return path


def array_file(head):
    """The content of a .npy file with the header `head`."""
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + b"\1\0" * 100


def targets_of(batches):
    return [token for _, targets in batches for token in targets.flatten().tolist() if token != IGNORED]


@pytest.mark.parametrize(
    ("name", "type_", "largest"),
    [("a.txt", "u1", 255), ("a.bin", "<u2", 300), ("A.BIN", "<u2", 300), ("a.u32", "<u4", 70_000)],
)
def test_each_kind_of_file(tmp_path, name, type_, largest):
    numbers = [*range(99), largest]
    source = data.open_source(options(write(tmp_path / name, numbers, type_)))
    assert (source.num_classes, source.size, source.unit) == (largest + 1, 4, "tokens")
    inputs, targets = source.train.read(0)
    assert (inputs.tolist(), targets.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    # 90 tokens train: of 89 targets 88 make 22 sequences. 10 validate: 9 targets make 3, the last with one target.
    assert (len(source.train), len(source.valid)) == (22, 3)
    assert source.num_valid_targets == 9
    assert source.valid.read(2)[1].tolist() == [largest, IGNORED, IGNORED, IGNORED]


@pytest.mark.parametrize(("magic", "type_"), [(20240520, "<u2"), (20240801, "<u4")])
@pytest.mark.parametrize("more", [{}, {"vocab_size": 50_257}])
def test_the_header_of_llm_c_is_no_text(tmp_path, magic, type_, more):
    for name, first in (("train.bin", 7), ("val.bin", 8)):
        numbers = np.array([first, *range(98), 50_256], type_)
        header = np.array([magic, 1, len(numbers), *[0] * 253], "<i4")
        (tmp_path / name).write_bytes(header.tobytes() + numbers.tobytes())
    source = data.open_source(options(tmp_path, **more))
    assert source.num_classes == 50_257
    assert (source.train.read(0)[0].tolist(), source.valid.read(0)[0].tolist()) == ([7, 0, 1, 2], [8, 0, 1, 2])
    assert source.num_valid_targets == 99
    assert len(data.open_source(options(tmp_path / "train.bin", **more)).train.tokens) == 90


@pytest.mark.parametrize("numbers", [[70_000, 128_000, 5, *range(197)], [7, 65, 30] * 100])
def test_numbers_of_32_bits_in_a_file_for_16_are_told(tmp_path, numbers):
    """If accepted, each second token would be the upper half of the one before, and the loss would look very good."""
    with pytest.raises(MusterError, match="32 bits"):
        data.open_source(options(write(tmp_path / "a.bin", numbers, "<u4")))
    assert data.open_source(options(write(tmp_path / "a.u32", numbers, "<u4"))).num_classes == max(numbers) + 1


@pytest.mark.parametrize("name", ["a.bin", "a.u32"])
@pytest.mark.parametrize("numbers", [[50_000, 128, 5, *range(197)], [7, 65, 30] * 100])
def test_numbers_of_64_bits_are_told(tmp_path, name, numbers):
    """`np.array(ids).tofile` writes them: a file called .u32 was then trained on with a 0 after each token."""
    with pytest.raises(MusterError, match="64 bits") as raised:
        data.open_source(options(write(tmp_path / name, numbers, "<i8")))
    assert "np.uint16 or np.uint32" in raised.value.fix
    assert "NAME.u32" not in raised.value.wrong


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4] * 40, [300, 20] * 100, [3, 50_000] * 100])
def test_numbers_of_16_bits_are_not_taken_for_32(tmp_path, numbers):
    assert data.open_source(options(write(tmp_path / "a.bin", numbers, "<u2"))).num_classes == max(numbers) + 1


@pytest.mark.process
def test_one_rank_reads_all_tokens_to_count_them(train, summary_of, tmp_path):
    count = """
import os
from muster.train.data import tokens
count_tokens = tokens.count_tokens
def told(*parts):
    print("counts:", os.environ["RANK"], flush=True)
    return count_tokens(*parts)
tokens.count_tokens = told
"""
    # A vocabulary of 65 tokens can't be divided evenly by 2 ranks; they train as one does all the same.
    file = write(tmp_path / "a.bin", [number * number % 65 for number in range(600)], "<u2")
    argv = [f"--data=tokens:{file}", "--model=gpt-tiny", "--seq-len=16", "--batch-size=4", "--max-steps=3", "--no-bf16"]
    argv += [f"--runs-dir={tmp_path}"]
    ended = train(["tp", *argv, "--name=two"], 2, ok=True, before=count)
    assert "".join(rank.out + rank.err for rank in ended).count("counts: ") == 1
    train(["single", *argv, "--name=one"], 1, ok=True)
    losses = [summary_of(tmp_path / name)["final_train_loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_arrays_of_numpy(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    assert data.open_source(options(tmp_path / "a.npy")).num_classes == 100
    for bad in (np.zeros((3, 4), np.uint16), np.zeros(4), np.arange(9), np.array([{"a": 1}], dtype=object)):
        np.save(tmp_path / "b.npy", bad, allow_pickle=True)
        with pytest.raises(MusterError, match="can't be read") as raised:
            data.open_source(options(tmp_path / "b.npy"))
        assert "np.uint16" in raised.value.fix
        assert "--vocab-size" not in raised.value.fix


def test_a_folder_with_two_halves(tmp_path):
    write(tmp_path / "train.bin", range(50), "<u2")
    write(tmp_path / "val.bin", range(60), "<u2")
    source = data.open_source(options(tmp_path))
    assert (len(source.train), source.num_valid_targets, source.num_classes) == (12, 59, 60)


@pytest.mark.parametrize("name", ["val.txt", "valid.txt", "validation.txt", "validation.bin", "val.BIN"])
def test_the_text_that_validates_may_be_called_by_other_names(tmp_path, name):
    for half, letter in ((f"train.{name.split('.')[1]}", b"a"), (name, b"b")):
        (tmp_path / half).write_bytes(letter * 200)
    source = data.open_source(options(tmp_path))
    assert {*bytes(source.train.tokens)} == {ord("a")}
    assert {*bytes(source.valid.tokens)} == {ord("b")}


@pytest.mark.parametrize(
    ("pattern", "half"),
    [
        *(("{}.txt", half) for half in ("val", "valid", "validation", "dev", "Valid")),
        *(("{}.bin", "validation"), ("wiki.{}.raw", "valid"), ("owt_{}.bin", "val"), ("{}/a/1.txt", "val")),
    ],
)
def test_names_say_what_trains_and_what_validates(tmp_path, pattern, half):
    train = "Train" if half.istitle() else "train"
    for name, letter in ((train, b"a"), (half, b"b"), ("test", b"c")):
        (path := tmp_path / pattern.format(name)).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(letter * 200)
    (tmp_path / "README.md").write_text("d" * 200)
    source = data.open_source(options(tmp_path))
    assert {*source.train.tokens.tobytes().strip(b"\0")} == {ord("a")}
    assert {*source.valid.tokens.tobytes().strip(b"\0")} == {ord("b")}
    (note,) = source.notes
    top = pattern.partition("/")[0].format
    assert f"{top(train)} trains and {top(half)} validates" in note


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.raw", "{}/a/1.txt"])
def test_texts_for_tests_do_not_train(tmp_path, pattern):
    for name in ("train", "test"):
        (path := tmp_path / pattern.format(name)).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a text " * 20)
    with pytest.raises(MusterError, match="training and test data would be mixed") as raised:
        data.open_source(options(tmp_path))
    top = tmp_path / pattern.partition("/")[0].format("train")
    assert f"--data=tokens:{top}, whose last tenth" in raised.value.fix
    assert data.open_source(options(top)).num_classes == 256


def test_a_half_is_named_as_a_shell_takes_it(tmp_path):
    (folder := tmp_path / "a b").mkdir()
    for name in ("train.txt", "test.txt"):
        (folder / name).write_text("a text " * 20)
    with pytest.raises(MusterError) as raised:
        data.open_source(options(folder))
    assert f"'--data=tokens:{folder / 'train.txt'}'" in raised.value.fix


def test_a_whole_pair_counts_beside_one_that_lacks_a_half(tmp_path):
    for name in ("train.txt", "val.txt", "old_train.bin"):
        (tmp_path / name).write_bytes(b"a" * 200)
    (tmp_path / "train.u32").symlink_to(tmp_path / "gone")
    assert len(data.open_source(options(tmp_path)).train.tokens) == 200


def test_halves_without_texts_are_told_as_that(tmp_path):
    for half in ("train", "val"):
        (tmp_path / half).mkdir()
        write(tmp_path / half / "0.bin", range(200), "<u2")
    with pytest.raises(MusterError, match="holds no texts"):
        data.open_source(options(tmp_path))


def test_names_of_programs_and_of_stories_split_nothing(tmp_path):
    for name in ("train.py", "test.py", "val.py", "train journey.txt", "test drive.txt", "constrain.txt", "val.md"):
        (tmp_path / name).write_text(f"[{name}]" * 5)
    source = data.open_source(options(tmp_path))
    assert len(source.train.tokens) + len(source.valid.tokens) == sum(
        path.stat().st_size + 1 for path in tmp_path.iterdir()
    )


@pytest.mark.parametrize("names", [["train.bin"], ["val.npy"], ["train.bin", "val.u16"]])
def test_a_half_without_the_other_is_refused_and_not_read_as_text(tmp_path, names):
    (tmp_path / "prepare.py").write_text("what wrote the tokens\n" * 20)
    for name in names:
        (tmp_path / name).write_bytes(b"ab" * 50)
    with pytest.raises(MusterError, match="one of two") as raised:
        data.open_source(options(tmp_path))
    assert raised.value.seen == str(tmp_path / names[0])


@pytest.mark.parametrize("name", [None, "fineweb_train_000001.bin", "link.txt"])
def test_a_folder_without_a_text_is_not_told_of_its_length(tmp_path, name):
    (tmp_path / "text").write_text("a text, for the link " * 20)
    folder = tmp_path / "folder"
    folder.mkdir()
    if name == "link.txt":
        (folder / name).symlink_to(tmp_path / "text")
    elif name:
        write(folder / name, range(200), "<u2")
    with pytest.raises(MusterError, match="holds no texts") as raised:
        data.open_source(options(folder))
    assert str(folder) in raised.value.seen
    assert "links" in raised.value.fix
    assert "train.bin" in raised.value.fix


def test_a_folder_of_texts(tmp_path):
    for name in ("a.py", "b/c.md", ".git/hidden", "b/.x", "run/summary.json", "run/log.txt", "binary", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"[{name}]" * 5)
    (tmp_path / "binary").write_bytes(b"text, and then \0")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "a.py")
    (tmp_path / "closed").symlink_to("a" * 300)  # following it is an error, as into a folder of another user
    source = data.open_source(options(tmp_path))
    text = bytes([*source.train.tokens, *source.valid.tokens])
    assert sorted(text.split(b"\0")) == [b"", b"[a.py]" * 5, b"[b/c.md]" * 5]
    assert [note for note in source.notes if note.startswith("4 files left out: links, empty files, and ")]
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"), symlinks=True)
    assert bytes(data.open_source(options(copy)).train.tokens) == bytes(source.train.tokens)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, b"", "can't be read"),
        ("a.bin", None, "no regular file"),
        ("a.npy", None, "no regular file"),
        ("a.bin", b"123", "16-bit"),
        ("a.txt", b"12345", "too few for one sequence of 4"),
        ("a.txt", b"", "too few for one sequence of 4"),
        ("a.npy", b"no array", "can't be read"),
        ("a.npy", b"", "can't be read"),
        ("a.npy", b"PK\x03\x04 of an .npz", "can't be read"),
        ("a.npy", array_file("{'descr': '<u2', 'fortran_order"), "can't be read"),
        ("a.npy", array_file(f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({10**30},)}}"), "can't be read"),
        ("a.bin", bytes(400), "only zeros"),
    ],
)
@pytest.mark.timeout(60)
def test_files_that_hold_no_tokens_are_refused(tmp_path, name, content, words):
    path = tmp_path / (name or "none")
    if content is None:
        os.mkfifo(path)  # a reader would wait for ever
    elif name:
        path.write_bytes(content)
    with pytest.raises(MusterError, match=words) as raised:
        data.open_source(options(path))
    assert str(path) in raised.value.seen


@pytest.mark.parametrize(("content", "is_noted"), [(b"PAR1\0" * 200, True), (b"a text " * 200, False)])
def test_a_file_of_another_format_is_read_as_bytes_with_a_note(tmp_path, content, is_noted):
    (tmp_path / "train.parquet").write_bytes(content)
    source = data.open_source(Options(model="gpt-tiny", seq_len=8, data=f"tokens:{tmp_path / 'train.parquet'}"))
    assert any("holds zero bytes, as no text does" in note for note in source.notes) == is_noted


def test_numbers_that_no_tokenizer_has_are_told_before_a_model_is_built_for_them(tmp_path):
    path = write(tmp_path / "a.u32", [*range(99), 2**31], "<u4")
    with pytest.raises(MusterError, match="numbers too large for tokens") as raised:
        data.open_source(options(path))
    assert f"{path}, the largest is {2**31}" in raised.value.seen
    assert data.open_source(options(path, vocab_size=2**31 + 1)).num_classes == 2**31 + 1


@pytest.mark.parametrize(
    ("model", "source", "fix"), [("gpt-tiny", "digits", "tokens:PATH"), ("resnet18", "tokens:/x", "gpt-tiny")]
)
def test_data_that_the_model_does_not_read(model, source, fix):
    with pytest.raises(MusterError) as raised:
        data.open_source(Options(model=model, data=source))
    assert fix in raised.value.fix


@pytest.mark.parametrize(("num_workers", "token"), [(0, 777), (0, 60), (1, 777)])
def test_a_token_beyond_the_vocabulary_is_named(tmp_path, num_workers, token):
    path = write(tmp_path / "a.bin", [*range(50), token, *range(49)], "<u2")
    asked = options(path, vocab_size=60, train_num_workers=num_workers)
    train, _ = open_batches(data.open_source(asked), asked, World())
    with pytest.raises(MusterError, match=f"token {token} in a vocabulary of 60") as raised:
        list(train)
    train.close()
    assert raised.value.seen == f"{path}, place 50"
    assert "--vocab-size" in raised.value.fix


def test_a_token_that_validates_is_named_by_its_place_in_the_file(tmp_path):
    beyond = [*range(50), *range(45), 777, *range(4)]
    write(tmp_path / "train.bin", range(50), "<u2")
    for path, name, place in (
        (write(tmp_path / "a.bin", beyond, "<u2"), "a.bin", 95),
        (write(tmp_path / "val.bin", beyond, "<u2").parent, "val.bin", 95),
    ):
        asked = options(path, vocab_size=60)
        _, valid = open_batches(data.open_source(asked), asked, World())
        with pytest.raises(MusterError, match="token 777") as raised:
            list(valid)
        assert raised.value.seen == f"{tmp_path / name}, place {place}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_token_validates_once_and_all_ranks_take_as_many_batches(tmp_path, world_size):
    path = write(tmp_path / "a.txt", list(range(250)), "u1")
    seen, rounds = [], set()
    for rank in range(world_size):
        asked = options(path, seq_len=3)
        _, valid = open_batches(data.open_source(asked), asked, World(rank=rank, world_size=world_size))
        batches = list(valid)
        rounds.add(len(batches))
        seen += targets_of(batches)
    assert sorted(seen) == list(range(226, 250))
    assert len(rounds) == 1


def test_synthetic_tokens_do_not_depend_on_the_world_size():
    asked = Options(model="gpt-tiny", data="synthetic", num_samples=24, batch_size=4, seq_len=8)
    source = data.open_source(asked)
    assert (len(source.train), len(source.valid), source.num_classes) == (24, 2, 256)
    [one] = [torch.cat([inputs for inputs, _ in open_batches(source, asked, World())[0]])]
    parts = [
        torch.stack([inputs for inputs, _ in open_batches(source, asked, World(rank=rank, world_size=2))[0]])
        for rank in (0, 1)
    ]
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 2), one)


@pytest.mark.process
def test_a_transformer_learns_these_sources(train, summary_of, tmp_path):
    argv = ["ddp", "--model=gpt-tiny", f"--data=tokens:{ROOT / 'train'}", "--seq-len=64", "--batch-size=16"]
    argv += ["--max-steps=60", "--lr=0.003", "--name=run", f"--runs-dir={tmp_path}", "--no-bf16"]
    [ended, _] = train(argv, 2, ok=True)
    print(ended.out)
    summary = summary_of(tmp_path / "run")
    assert "tokens per second" in ended.out
    assert summary["tokens_per_second"] > 0
    assert (summary["options"]["optimizer"], summary["options"]["seq_len"]) == ("adamw", 64)
    # Equal guesses give a loss of ln(256) = 5.5; the frequencies of single bytes alone give more than 3.2.
    assert summary["final_valid_loss"] < 3.0
    # The same loss by hand, over every token once.
    _, state, _ = checkpoint.load_newest(tmp_path / "run")
    asked = Options(model="gpt-tiny", data=f"tokens:{ROOT / 'train'}", seq_len=64, batch_size=50)
    source = data.open_source(asked)
    model = models.place(models.build(asked, 256, 64), torch.device("cpu"), torch.preserve_format, 0)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        losses = [loss_of(model(inputs), targets) * (targets != IGNORED).sum() for inputs, targets in valid_of(asked)]
    assert sum(losses).item() / source.num_valid_targets == pytest.approx(summary["final_valid_loss"], rel=1e-4)


def valid_of(asked):
    return open_batches(data.open_source(asked), asked, World())[1]
