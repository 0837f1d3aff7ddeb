"""Examines a machine and a recipe before a run: what will fail, what may fail, and what to do about it.

Runs in: the command.

Every check measures or tries what the run will need; none relies on a list of supported versions.
"""
