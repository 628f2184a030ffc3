"""What a run measures, shows and writes."""
