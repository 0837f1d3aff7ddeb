"""The checkpoint engine: makes the trainer's weights the replicas' weights, as one transaction per replica.

Runs in: driver.
"""
