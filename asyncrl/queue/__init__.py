"""The message queue between rollouter and trainer: `staleness.py` decides which groups are admitted and trained,
`ledger.py` holds the state of every group, `masking.py` masks tokens over the limit.

Runs in: message queue.
"""
