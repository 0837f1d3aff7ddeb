"""Inside a Hugging Face model: matrix products by oneDNN, where it is faster than torch's default, and routers.

Runs in: trainer ranks, replicas.
"""
