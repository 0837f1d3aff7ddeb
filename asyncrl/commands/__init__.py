"""The commands `asyncrl-train`, `asyncrl-serve`, `asyncrl-eval` and `asyncrl-export`.

Runs in: driver.
"""
