"""Programs that look at the place where training runs: each is started in a process of its own, and can print JSON."""
