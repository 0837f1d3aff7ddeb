"""Metrics, events, logs, progress and sinks; the evidence of a failure.

Runs in: driver; message queue (events).
"""
