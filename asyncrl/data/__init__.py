"""Training data: dataset rows, their order, their token ids, and the built-in arithmetic task.

Runs in: driver (checks), rollouter.
"""
