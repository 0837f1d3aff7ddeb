"""One thread per process: test processes share few cores, and spinning threads slow each other down tenfold."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("asyncrl", deadline=None)  # a busy machine is no failure
settings.load_profile("asyncrl")
