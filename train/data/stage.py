"""`--stage-to`: the data are copied to each host's own disk, once, and read from there.

One rank of a host copies; the others wait as long as anything moves. A copy gets its name when it is whole, so that a
run that starts again on the host finds it, and one that was stopped leaves nothing that looks like it.
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch.distributed as dist

from train.data import tokens
from train.data.encoded import Names, joined
from train.data.imagefolder import halves_of
from train.data.imagefolder import scan as scan_images
from train.data.index import KEPT, LAYOUT, shards_in
from train.data.progress import Progress
from train.data.sharing import Arrays, from_main
from train.data.staging import Copy
from train.errors import FAILED, MusterError
from train.faults import agree
from train.options import Options
from train.vitals import SET_UP, STAGING
from train.world import World

NUM_THREADS = 16
STAGED = ("cifar10", "imagefolder", "shards", "tokens")
EVERY_S = 0.5
"""Seconds between two looks at who is how far."""


def stage_data(options: Options, world: World) -> tuple[Options, list[str]]:
    """`options` with this host's copy as `--data`, and what the user should know; to be called on all ranks.

    Raises:
        SharedFault: on all ranks, where one host has no room, no such folder, or can't read or write.
    """
    if options.stage_to is None:
        return options, []
    name, _, given = options.data.partition(":")
    agree(world, lambda: check(options, name))
    started = time.monotonic()
    source = Path(os.path.expanduser(given))
    files = from_main(world, lambda: list_files(options, name, source))
    hosts = world.hosts or (world.host,)
    base = source if bool(files["is_folder"]) else source.parent
    copies = world.rank == hosts.index(world.host)
    folder = agree(world, lambda: expanded(options.stage_to or "") if copies else None)
    copy = None if folder is None else Copy(base, folder, files, digest_of(base, files))
    if copy is not None:
        copy.start()
    watch(world, copy, int(files["sizes"].sum()))
    world.vitals.at(SET_UP)
    place = agree(world, lambda: None if copy is None else copy.result())
    # Of the rank that copied: ranks of one host may have other ideas of $TMPDIR.
    own = Path(world.gather(None if place is None else str(place))[hosts.index(world.host)])
    where = own if bool(files["is_folder"]) else own / source.name
    note = f"the data are read from {where}: {len(files['sizes']):,} files, {files['sizes'].sum() / 1e9:.2f} GB"
    note += f" on each host's own disk, after {time.monotonic() - started:.1f} s"
    return replace(options, data=f"{name}:{where}"), [note]


def check(options: Options, name: str) -> None:
    """Returns where the data are files.

    Raises:
        MusterError: they are made up, or come with this program.
    """
    if name not in STAGED:
        seen = f"--data={options.data} --stage-to={options.stage_to}"
        fix = f"leave out --stage-to; it is for {', '.join(STAGED)}"
        raise MusterError(f"{name} has no files that could be copied", seen=seen, fix=fix)


def expanded(text: str) -> Path:
    """The folder that `--stage-to` means on this host, whose variables may differ from the first one's.

    Raises:
        MusterError: it names a variable that is not set here, or nothing.
    """
    place = os.path.expandvars(os.path.expanduser(text))
    if not text or "$" in place:
        wrong = "a variable in --stage-to is not set" if text else "--stage-to names no folder: a variable is empty"
        fix = "--stage-to=FOLDER on this node's own disk; ask the site which, often $TMPDIR or /tmp"
        raise MusterError(wrong, seen=f"--stage-to={text}", fix=fix)
    return Path(place).absolute()


def list_files(options: Options, name: str, source: Path) -> Arrays:
    """The files of the data at `source`, with their sizes and times.

    Raises:
        MusterError: there are none, or they can't be read.
    """
    try:
        names = names_of(options, name, source)
        base = source if source.is_dir() else source.parent
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            states = list(pool.map(lambda own: os.stat(os.path.join(os.fsencode(base), own)), names))
    except OSError as error:
        raise MusterError(
            f"the data can't be read: {error.strerror}",
            seen=f"--data={options.data} ({os.fsdecode(error.filename or source)})",
            fix="see that they are there and this user may read them; in a container, that they are bound into it",
        ) from error
    return {
        "names": joined(names),
        "sizes": np.array([state.st_size for state in states]),
        "times": np.array([state.st_mtime_ns for state in states]),
        "is_folder": np.array(source.is_dir()),
    }


def names_of(options: Options, name: str, source: Path) -> list[bytes]:
    """The files that training reads of the data, below `source`, or its own name where it is a file."""
    if name == "imagefolder":
        paths = Names(scan_images(options, str(source))["paths"])
        return [paths[number] for number in range(len(paths))]
    if name == "shards":
        seen = f"--data={options.data}"
        found = [path for half in halves_of(source, seen, LAYOUT) for path in shards_in(half, seen)]
        beside = [*{path.with_name(KEPT) for path in found}, source / "classes.json"]
        found += sorted(path for path in beside if path.is_file())
    elif name == "cifar10":
        found = sorted(path for path in (source / "cifar-10-batches-py").iterdir() if path.is_file())
    elif source.is_dir():
        found = list(tokens.halves(source) or sorted(tokens.texts_below(source)))
    else:
        return [os.fsencode(source.name)]
    return [os.fsencode(path.relative_to(source)) for path in found]


def digest_of(base: Path, files: Arrays) -> str:
    """What tells these files, as they are now, from others."""
    digest = blake2b(os.fsencode(base.resolve()), digest_size=8)
    for name in ("names", "sizes", "times"):
        digest.update(files[name].tobytes())
    return digest.hexdigest()


def watch(world: World, copy: Copy | None, num_bytes: int) -> None:
    """Returns when all hosts have their copy, or one has failed; rank 0 says how far they are.

    Raises:
        MusterError: nothing moved for `--timeout-s`.
    """
    world.vitals.at(STAGING)
    hosts = world.hosts or (world.host,)
    copiers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    progress = Progress("staged", num_bytes * len(copiers), enabled=world.main)
    if copy is not None:
        tell(world, copy)
    world.gather(None)  # from here on all of them have told something
    if not world.main:
        follow(world, copy)
        return
    assert copy is not None
    last, moved = -1, time.monotonic()
    while True:
        tell(world, copy)
        states = [copy.state()] if world.store is None else read(world, copiers)
        done, ended = sum(state[0] for state in states), [state[1] for state in states]
        if world.store is not None:
            world.store.set("stage/seen", str(done))
        if all(ended) or any(state[2] for state in states):
            break
        if done != last:
            last, moved = done, time.monotonic()
        elif time.monotonic() - moved > world.timeout_s:
            late = [hosts[rank] for rank, has in zip(copiers, ended, strict=True) if not has]
            raise stuck(world, f"{', '.join(late[:4])}")
        progress.show(done, f", {sum(ended)} of {len(copiers)} hosts are done")
        if copy.state()[1]:
            time.sleep(EVERY_S)
        else:
            copy.wait(EVERY_S)
    copy.stop()
    if all(ended):
        progress.end(done)
    if world.store is not None:
        world.store.set("stage/all", "")


def tell(world: World, copy: Copy) -> None:
    """Says how far this host is."""
    if world.store is not None:
        world.store.set(f"stage/{world.rank}", json.dumps(copy.state()))


def read(world: World, copiers: list[int]) -> list[tuple[int, bool, bool]]:
    """How far each host is."""
    assert world.store is not None
    return [tuple(json.loads(text)) for text in world.store.multi_get([f"stage/{rank}" for rank in copiers])]


def follow(world: World, copy: Copy | None) -> None:
    """Returns when rank 0 says that all are done, or that one has failed, upon which this one stops copying.

    Raises:
        MusterError: rank 0 saw nothing move for `--timeout-s`, and didn't say so.
    """
    assert world.store is not None
    while copy is not None and not copy.state()[1]:
        copy.wait(EVERY_S)
        tell(world, copy)
        if world.store.check(["stage/all"]):
            copy.stop()
            return
    if copy is not None:
        tell(world, copy)
    seen = ""
    while True:
        try:
            world.store.wait(["stage/all"], timedelta(seconds=world.timeout_s + 5))
        except dist.DistError:
            now = world.store.get("stage/seen").decode()
            if now == seen:
                raise stuck(world, "other hosts") from None
            seen = now
        else:
            return


def stuck(world: World, who: str) -> MusterError:
    """The error about a copy that does not get on."""
    return MusterError(
        "staging does not get on",
        seen=f"nothing was copied for {world.timeout_s} s on {who}",
        fix="look at the disks there, or allow more time: --timeout-s; or leave out --stage-to",
        code=FAILED,
    )
