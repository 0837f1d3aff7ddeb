"""The commands `asyncrl-train`, `asyncrl-serve`, `asyncrl-eval`, `asyncrl-export`, `asyncrl-plan` and others.

Runs in: driver.
"""
