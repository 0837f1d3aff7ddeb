"""Arithmetic that torch has, done by what is faster on the processor at hand.

Runs in: trainer ranks, replicas.
"""
