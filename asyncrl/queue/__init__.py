"""The bounded-staleness message queue: a broker with acknowledgements between rollouter and trainer.

Runs in: message queue.
"""
