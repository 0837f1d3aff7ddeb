"""Trains: planner and packing; `step/` is the training step over any backend, `fsdp/` the backend
of FSDP2, `megatron/` that of Megatron-core.

Runs in: driver, trainer rank.
"""
