"""The steps of `benchmarks/gpu.py`, each in a process of its own."""
