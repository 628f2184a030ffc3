"""What a rank is among all: its place and device (world.py), and the groups that it speaks through (backends.py)."""
