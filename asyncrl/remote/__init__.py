"""Waits on other processes: deadlines, names, restart budgets, the policy for failures (`failure_policy.py`), and
connections beside Ray for calls that are made often (`line.py`).

Runs in: everywhere.
"""
