"""Waits on other processes: deadlines, names, restarts, and what follows when one fails.

Runs in: everywhere.
"""
