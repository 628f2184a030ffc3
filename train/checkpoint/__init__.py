"""What a run leaves to go on from."""
