"""Drives a run: `run.py` builds and restarts its parts and handles signals, `coordinator.py` decides what happens next.
Its folders own the processes of the run.

Runs in: driver.
"""
