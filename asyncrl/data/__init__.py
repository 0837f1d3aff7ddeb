"""Training data: dataset rows, their order and their token ids.

Runs in: driver (checks), rollouter.
"""
