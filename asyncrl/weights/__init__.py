"""Moves the bytes of a publish: bucket plan, digests and transports; `encodings/` says what the tensors are.

Runs in: sending trainer ranks, replica.
"""
