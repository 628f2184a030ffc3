"""Data: from the source that `--data` names to batches on the training device.

A source is one module, imported only when `--data` names it; `SOURCES` in muster/config.py lists them. It has
`open_source(options) -> Source` (source.py). A source that has to search a folder, or to read a whole file, also has
`scan(options)`: rank 0 calls it, and each rank passes its result to `open_source`. Image files are decoded and cropped
by images.py, or on the GPU by nvjpeg.py. sampler.py chooses the samples of each rank; loader.py reads them in worker
processes, and brings the batches to the device. pack.py is the command `train pack`.
"""

from muster.train.data.source import open_source as open_source
