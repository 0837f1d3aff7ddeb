"""The OpenAI-compatible server in front of replicas.

Runs in: driver of `asyncrl-serve`; a process of a run that serves while it trains.
"""
