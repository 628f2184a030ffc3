"""Data: from the source that `--data` names to batches on the training device.

A source is one module, imported when it is asked for; `SOURCES` in muster/config.py lists them. It has
`open_source(options) -> Source` (source.py). One that has to search its folder, or to read all of a file, also has
`scan(options)`: rank 0 calls it, and `open_source` gets its result too. Image files are cropped and decoded by
images.py, or on the GPU by nvjpeg.py. sampler.py says which samples each rank takes; loader.py reads them in its
workers, and brings the batches to the device. `train pack` is pack.py.
"""

from muster.train.data.source import open_source as open_source
