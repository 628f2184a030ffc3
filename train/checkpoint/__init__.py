"""Checkpoints (manager.py), their files (storage.py), and the run's folder that has them (run_directory.py)."""
