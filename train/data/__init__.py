"""Data: from the source that `--data` names to batches on the training device.

A source is one module, imported when it is asked for: synthetic, fake, digits, cifar10, imagefolder, shards, tokens. It
has `open_source(options, folder) -> Source` (source.py). One that has to search its folder, or to read all of a file,
also has `scan(options, folder)`: rank 0 calls it, and `open_source` gets its result too. Image files are cropped and
decoded by images.py, or on the GPU by nvjpeg.py. reader.py makes batches in the loader's workers, for which shm.py
checks the room in /dev/shm; loader.py brings them to the device.
"""

from muster.train.data.source import open_shared, open_source

__all__ = ["open_shared", "open_source"]
