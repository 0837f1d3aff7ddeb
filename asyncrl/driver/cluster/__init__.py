"""The Ray session of a run, where its processes are placed, and the janitor that cleans up after it.

Runs in: driver; its own process (janitor).
"""
