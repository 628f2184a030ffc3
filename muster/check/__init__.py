"""Programs that check or measure the machines for a training: each runs in its own process, and can print JSON."""
