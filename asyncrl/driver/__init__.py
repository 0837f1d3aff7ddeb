"""Drives a run: composition root, coordinator, actors, preflight, evaluation schedule and step record.

Runs in: driver.
"""
