"""The run directory and its checkpoints: `store.py` completes, checks and deletes them.

Runs in: driver.
"""
