"""What can go wrong with a rank, and who says so."""
