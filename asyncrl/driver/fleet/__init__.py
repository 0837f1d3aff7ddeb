"""Owners of processes: replicas, rollouters, trainer ranks, servers. Each starts, replaces and ends its own kind.

Runs in: driver.
"""
