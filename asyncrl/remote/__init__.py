"""Waits on other processes: deadlines, names, restart budgets, the policy for failures (`failure_policy.py`), and
direct connections for frequent calls (`connection.py`).

Runs in: everywhere.
"""
