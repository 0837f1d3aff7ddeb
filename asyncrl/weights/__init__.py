"""Moves the bytes of a publish: bucket plan, digests and transports. `encodings/` defines the tensors.

Runs in: sending trainer ranks, replica.
"""
