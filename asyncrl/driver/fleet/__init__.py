"""Owners of processes: replicas, rollouters, trainer ranks, servers. One starts, replaces and ends its kind.

Runs in: driver.
"""
