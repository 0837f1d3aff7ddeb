"""The OpenAI-compatible server in front of replicas.

Runs in: driver of `asyncrl-serve`; rollouter (agent endpoint).
"""
