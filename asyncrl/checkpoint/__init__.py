"""The run directory and its checkpoints: written as a transaction, checked before they are read.

Runs in: driver.
"""
