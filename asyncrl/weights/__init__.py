"""Moves the bytes of a publish: bucket plan, digests and transports; `encodings/` says what the tensors are.

Runs in: trainer rank 0, replica.
"""
