"""From what was found to the exec that ends this process: `start`, and what each part adds to the new process."""
