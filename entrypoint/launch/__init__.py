"""The launch, from detection to the exec that replaces this process: `start`, and the parts that add to the result."""
