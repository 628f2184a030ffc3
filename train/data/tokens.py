"""Tokens from a file or a folder: numbers that a tokenizer has written, or the bytes of any text."""

import os
import re
import shlex
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch

from muster.config import Options
from muster.errors import MusterError
from muster.paths import check_regular
from muster.train.data.source import BadSample, Samples, Source, left_out
from muster.train.models import IGNORED
from muster.train.models.gpt import shape_of

VALID_SHARE = 0.1
TYPES = {".bin": "<u2", ".u16": "<u2", ".uint16": "<u2", ".u32": "<u4", ".uint32": "<u4"}
"""The dtype of a file's tokens, by the suffix of its name; .npy files name their own, and all others are bytes."""

HEADERS = {20240520: "<u2", 20240801: "<u4"}
"""The dtype after a header of 1024 bytes, by its first 32 bits. Source: karpathy/llm.c, dev/data/data_common.py"""

NUM_BYTES = 256
MAX_TOKENS = 1 << 20
"""The largest vocabulary: no tokenizer has more. A file with more, and no --vocab-size, is taken for damaged."""

NUMBERS = (*TYPES, ".npy")
HALF = re.compile(r"(|[^.].*[._-])(train|val|valid|validation|dev|test)(\..*|)", re.IGNORECASE)
ENDS = (*NUMBERS, ".txt", ".raw", ".tokens", ".jsonl", "")
"""Suffixes of the names that say, by HALF, what trains and what validates; the empty one is for folders of texts.

Source: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

RUN_FILES = ("checkpoints", "metrics.jsonl", "summary.json")
HOLDS = "see that the file's content is what its suffix says: " + ", ".join(NUMBERS)
NO_TEXT = "the file is read as text, but holds zero bytes, as no text does: is it compressed, or of another format?"
FIX_FILE = f"save the numbers as np.uint16 or np.uint32, or {HOLDS}"


class Tokens(Samples):
    """Sequences, cut end to end from one long array, whose targets are the same tokens shifted by one.

    Args:
        tokens_N: unsigned numbers, in memory or mapped from a file.
        keep_rest: whether the last few tokens, too few for a whole sequence, become one too, filled up with targets
            that don't count.
        first: the position of the first of `tokens_N` in the data called `name`, for errors.
    """

    def __init__(
        self, name: str, tokens_N: np.ndarray, seq_len: int, num_tokens: int, *, keep_rest: bool, first: int = 0
    ) -> None:
        self.name = name
        self.first = first
        self.tokens = tokens_N
        self.seq_len = seq_len
        self.num_tokens = num_tokens
        self.num_targets = len(tokens_N) - 1
        self.length = (self.num_targets + (seq_len - 1 if keep_rest else 0)) // seq_len

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.seq_len
        text = self.tokens[start : start + self.seq_len + 1]
        if text.max() >= self.num_tokens:  # before they are signed numbers
            place = self.first + start + int((text >= self.num_tokens).argmax())
            raise BadSample(f"{self.name}, place {place}", f"token {text.max()} in a vocabulary of {self.num_tokens}")
        text = text.astype(np.int64)
        inputs, targets = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORED)
        inputs[: len(text) - 1], targets[: len(text) - 1] = text[:-1], text[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def map_file(path: Path) -> np.ndarray:
    """The tokens in the file at `path`, memory-mapped: they are read when they are needed.

    Raises:
        ValueError, EOFError, OverflowError, TokenError: the file does not hold what its name promises.
    """
    check_regular(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        array = np.lib.format.open_memmap(path, mode="r")
        if array.ndim != 1 or array.dtype.kind != "u":
            raise ValueError(f"it holds {array.dtype} in {array.ndim} dimensions, not unsigned integers in one")
        return array
    head = HEADERS.get(np.fromfile(path, "<u4", 1).max(initial=0)) if suffix in TYPES else None
    type_, start = np.dtype(head or TYPES.get(suffix, "u1")), 1024 if head else 0
    if (size := path.stat().st_size - start) % type_.itemsize:
        raise ValueError(f"its {size} bytes can't be divided into {type_.itemsize * 8}-bit numbers")
    numbers_N = np.memmap(path, type_, mode="r", offset=start) if size > 0 else np.empty(0, type_)
    if type_.itemsize > 1 and size > 100:
        # Wider numbers lie in a file as a lower half, then an upper one, which is 0 unless the vocabulary is large.
        low_N, high_N = numbers_N[:8192:2], numbers_N[1:8192:2]
        if low_N.any() and not high_N.any() and not (type_.itemsize == 2 and low_N[1::2].any()):
            raise ValueError("nearly all of it is 0, as if its numbers had 64 bits, which is np.array's default")
        if type_.itemsize == 2 and high_N.max() < 16 and low_N.max() > (255 if high_N.any() else 0):
            raise ValueError("every second number is below 16, as if they had 32 bits: call such a file NAME.u32")
    return numbers_N


def halves(folder: Path) -> tuple[Path, Path] | None:
    """The training and the validation data in the folder, where names that are otherwise alike say so; else None.

    Raises:
        MusterError: one of two files of tokens is missing, or test data would be trained on.
    """
    found: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(folder.glob("*")):
        match = HALF.fullmatch(path.name)
        if match and (end := match[3].lower()) in ENDS and path.exists() and path.is_dir() == (end == ""):
            half = name if (name := match[2].lower()) in ("train", "test") else "val"
            found.setdefault((match[1], end), {}).setdefault(half, path)
    for start, end in sorted(found, key=lambda name: (not {"train", "val"} <= found[name].keys(), ENDS.index(name[1]))):
        parts = found[start, end]
        if {"train", "val"} <= parts.keys():
            return parts["train"], parts["val"]
        is_mixed = {"train", "test"} <= parts.keys()
        if is_mixed or (end in NUMBERS and parts.keys() != {"test"}):
            one = parts.get("train") or parts["val"]
            mixed, alone = "training and test data would be mixed", "one of two files of tokens is missing"
            itself = shlex.quote(f"--data=tokens:{one}")
            both = f"put both into the folder, {start}train{end} and {start}val{end}"
            fix = f"{both}; or name one of them, {itself}, whose last tenth then validates"
            raise MusterError(mixed if is_mixed else alone, seen=", ".join(map(str, parts.values())), fix=fix)
    return None


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files and links below `folder`, without hidden ones, and without the folders of runs, which grow."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        # What a link leads to is not looked at: this user may not be allowed to.
        if not path.is_symlink() and path.is_dir():
            if not any((path / name).exists() for name in RUN_FILES):
                yield from files_below(path)
        elif path.is_symlink() or path.is_file():
            yield path


def is_text(path: Path) -> bool:
    """Whether this is a file, not a link, that has content and no zero byte in its first 8 KiB."""
    if path.is_symlink():
        return False
    with path.open("rb") as file:
        head = file.read(8192)
    return len(head) > 0 and b"\0" not in head


def read(place: Path) -> tuple[np.ndarray, int]:
    """The tokens of a file; or the bytes of all text files below a folder, a zero after each; and the number of others.

    The order of the files mixes the subfolders, because the end of the data validates.
    """
    if not place.is_dir():
        return map_file(place), 0
    paths = sorted(files_below(place), key=lambda path: blake2b(os.fsencode(path.relative_to(place))).digest())
    texts = [path.read_bytes() + b"\0" for path in paths if is_text(path)]
    return np.frombuffer(b"".join(texts), np.uint8), len(paths) - len(texts)


def count_tokens(*parts: np.ndarray) -> int:
    """The size of the vocabulary of `parts`: 256 for bytes, else the largest token plus 1."""
    if all(part.dtype == np.uint8 for part in parts):
        return NUM_BYTES
    step = 1 << 24  # a piece at a time: the whole file may not fit into memory
    return 1 + max(int(part[start : start + step].max()) for part in parts for start in range(0, len(part), step))


def scan(options: Options) -> int:
    """The size of the vocabulary: `--vocab-size`, or by reading all tokens; MusterError where these can't be tokens."""
    num_tokens = options.vocab_size or count_tokens(*open_parts(options)[:2])
    if not 2 <= num_tokens <= MAX_TOKENS and not options.vocab_size:
        wrong = "the file holds numbers too large for tokens" if num_tokens > 1 else "the file holds only zeros"
        seen = f"--data={options.data}, the largest is {num_tokens - 1}"
        raise MusterError(wrong, seen=seen, fix=f"{HOLDS}; or --vocab-size=N")
    return num_tokens


def open_parts(options: Options) -> tuple[np.ndarray, np.ndarray, int]:
    """The tokens that train, and those that validate: the two `halves`, or the last tenth validates.

    The number is that of the files that were left out, as they are no text.

    Raises:
        MusterError: there are no tokens, they can't be read or are too few, or --on-bad-sample is skip.
    """
    path, seen = Path(os.path.expanduser(options.data.partition(":")[2])), f"--data={options.data}"
    seq_len = options.seq_len or shape_of(options.model).context
    if options.on_bad_sample == "skip":
        raise MusterError("bad samples of tokens can't be skipped", seen="--on-bad-sample=skip", fix="leave it out")
    try:
        if pair := halves(path):
            (train, num_others), (valid, others) = map(read, pair)
            num_others += others
        else:
            tokens_N, num_others = read(path)
            end = len(tokens_N) - round(len(tokens_N) * VALID_SHARE)
            train, valid = tokens_N[:end], tokens_N[end:]
        if path.is_dir() and not len(train):
            fix = "a folder with texts, or with train.bin and val.bin; or a file of tokens; links don't count"
            raise MusterError("the folder holds no texts", seen=f"{seen} ({path})", fix=fix)
    except OSError as error:
        fix = "--data=tokens:PATH that this user may read, on every node; in a container, see that it is bound into it"
        raise MusterError(f"the tokens can't be read: {error.strerror}", seen=f"{seen} ({path})", fix=fix) from error
    except (ValueError, EOFError, OverflowError, TokenError) as error:  # the last two by the head of a .npy file
        raise MusterError(f"the tokens can't be read: {error}", seen=f"{seen} ({path})", fix=FIX_FILE) from error
    if len(train) <= seq_len or len(valid) < 2:
        shares = f"{len(train)} tokens train and {len(valid)} validate"
        wrong = f"{shares}: too few for one sequence of {seq_len} and the token after it"
        raise MusterError(wrong, seen=f"{seen} --seq-len={seq_len}", fix="more text, or a smaller --seq-len")
    return train, valid, num_others


def open_source(options: Options, num_tokens: int) -> Source:
    """Opens the tokens, whose vocabulary has the size `num_tokens`, as `scan` found."""
    seq_len = options.seq_len or shape_of(options.model).context
    path = Path(os.path.expanduser(options.data.partition(":")[2]))
    train, valid, num_others = open_parts(options)
    pair, is_bytes = halves(path), path.is_file() and path.suffix.lower() not in NUMBERS
    notes = [NO_TEXT] if is_bytes and not train[:8192].all() else []
    notes += left_out(num_others, "links, empty files, and files with zero bytes, such as UTF-16")
    if pair:
        notes.append(f"{pair[0].name} trains and {pair[1].name} validates; all else in {path} is left out")
    train_name, valid_name = map(str, pair or (path, path))
    return Source(
        train=Tokens(train_name, train, seq_len, num_tokens, keep_rest=False),
        valid=Tokens(valid_name, valid, seq_len, num_tokens, keep_rest=True, first=0 if pair else len(train)),
        num_classes=num_tokens,
        size=seq_len,
        unit="tokens",
        fix_bad=f"give a larger --vocab-size, or {HOLDS}",
        notes=tuple(notes),
    )
