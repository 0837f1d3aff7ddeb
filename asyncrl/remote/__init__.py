"""Waits on other processes: deadlines, names, restart budgets, and the policy for failures (`failure_policy.py`).

Runs in: everywhere.
"""
