"""The checkpoint engine: copies the trainer's weights to the replicas, as one transaction per replica.

Runs in: driver.
"""
