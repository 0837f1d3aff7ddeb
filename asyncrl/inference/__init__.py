"""Inference: one engine per replica behind one protocol. `engines.py` lists the engines, `replica.py` gates one,
`membership.py` and `replica_pool.py` hold the fleet.

Runs in: replica; driver (pool).
"""
