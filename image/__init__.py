"""Builds the image: `python3 -m image.build` and `python3 -m image.sif`, by `make image` and `make sif`.

It runs before anything is installed, so it needs nothing but Python's own library.
"""
