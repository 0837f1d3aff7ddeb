"""The run directory and its checkpoints: `writer.py` writes them in the background, `store.py` completes, checks and
deletes them.

Runs in: driver.
"""
