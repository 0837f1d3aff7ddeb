"""Inference: one engine per replica behind one protocol. `engines.py` lists the engines, `replica.py` gates one.

Runs in: replica.
"""
