"""Metrics, events, logs, progress, sinks (W&B, TensorBoard), the watchdog, and the report of a failure.

Runs in: driver; message queue (events).
"""
