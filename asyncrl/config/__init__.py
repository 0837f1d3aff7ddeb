"""The recipe's schema: frozen dataclasses, one file per part. `load.py` is the only user of OmegaConf.

Runs in: driver.
"""
