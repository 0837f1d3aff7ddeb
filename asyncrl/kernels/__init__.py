"""Matrix products by oneDNN, on processors where it is faster than torch's default.

Runs in: trainer ranks, replicas.
"""
