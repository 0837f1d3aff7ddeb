"""Drives a run: `run.py` builds and restarts its parts and handles signals, `coordinator.py` decides what happens next.

Runs in: driver.
"""
