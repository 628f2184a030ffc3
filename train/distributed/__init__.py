"""A rank's number, device and connection to the others (world.py), and the process group of all ranks (backends.py)."""
