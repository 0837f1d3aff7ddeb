"""The Ray session of a run, and the janitor that cleans up after it.

Runs in: driver; a process of its own (janitor).
"""
