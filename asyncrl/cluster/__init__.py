"""The Ray session of a run, and the janitor that ends what a run leaves behind.

Runs in: driver; a process of its own (janitor).
"""
