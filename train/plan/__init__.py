"""What each strategy would hold on a GPU, and the simplest that fits: `train plan`."""
