"""What a run measures of itself beside its times: operations, peaks of cards, traces."""
