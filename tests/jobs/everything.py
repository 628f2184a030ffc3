"""A profile in which every value could do harm where it is not quoted."""

from pathlib import Path

EVERYTHING = """
title = "A $(touch harm) 'site'"
centre = "Of \\"quotes\\""
scheduler = "{scheduler}"
status = "unverified"
documentation = "https://docs.example.org/gpu"
modules = {{value = ["load a b;touch${{IFS}}harm"], source = "s"}}
[nodes]
gpus = {{value = 4, source = "s"}}
cores = {{value = 48, source = "s"}}
memory_gib = {{value = 500, source = "s"}}
[launch]
partition = {{value = "gpu", source = "s", note = "whole nodes"}}
account = {{value = true, source = "s"}}
directives = {{value = ["--opt=$(touch harm) x"], source = "s"}}
flags = {{value = ["--flag=$(touch harm) 'x'", "--one"], source = "s", when = {{nodes = ">1"}}}}
[container]
command = {{value = "singularity", source = "s"}}
modules = {{value = ["sing$(touch harm)"], source = "s"}}
options = {{value = ["--opt=a 'b' $(touch harm)"], source = "s"}}
binds = {{value = ["/a b", "/c:/d"], source = "s"}}
[storage]
scratch = {{value = "$SCRATCH/a b", source = "s"}}
hints = {{value = ["hint `touch harm`"], source = "s"}}
[caches]
TORCH_HOME = {{value = "${{SCRATCH}}/t", source = "s"}}
[sources.s]
url = "https://docs.example.org/a"
read = 2026-11-01
"""


def site(folder: Path, scheduler: str, name: str = "a $(touch harm) site.toml") -> str:
    """Writes such a profile; returns its path."""
    path = folder / name
    path.write_text(EVERYTHING.format(scheduler=scheduler))
    return str(path)
