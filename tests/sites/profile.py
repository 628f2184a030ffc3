"""A valid profile of a site, which tests change to make it invalid."""

from pathlib import Path

from muster.entrypoint.sites import profiles
from muster.entrypoint.sites.profiles import BadProfile

HEAD = """\
title = "Testbooster"
centre = "Somewhere"
scheduler = "slurm"
status = "documented"
extends = "infiniband"
documentation = "https://docs.example.org/gpu"
recognise.cluster = {value = ["testbooster"], source = "docs"}
recognise.hosts = {value = ["tb[0-9]*"], source = "docs"}
"""
TABLES = """
[sources]
docs = {url = "https://docs.example.org/gpu", read = 2026-01-31}

[nodes]
gpus = {value = 4, source = "docs"}

[launch]
partition = {value = "booster", source = "docs"}
flags = {value = ["--cpu-bind=none"], source = "docs"}

[network]
address_suffix = {value = "i", source = "docs"}

[caches]
HF_HOME = {value = "$SCRATCH/hf", source = "docs"}

[variables]
NCCL_IB_TIMEOUT = {value = "20", source = "docs", when = {nodes = ">1"}}
"""
VALID = HEAD + TABLES
FABRIC = 'title = "InfiniBand"\nstatus = "documented"\nis_rdma = true\n'


def written(folder: Path, text: str = VALID, name: str = "testbooster") -> Path:
    """Writes `text` as a profile into a folder of sites, next to a folder of fabrics; returns the profile's path."""
    for each in ("sites", "fabrics"):
        (folder / each).mkdir(exist_ok=True)
    (folder / "fabrics" / "infiniband.toml").write_text(FABRIC)
    path = folder / "sites" / f"{name}.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> tuple[str, ...]:
    """The problems of a site's profile with this text; empty if it is valid."""
    path = written(folder, text)
    try:
        profiles.load_site(path, fabrics=folder / "fabrics")
    except BadProfile as bad:
        return bad.problems
    return ()
