"""One thread per process: test processes share few cores, and spinning threads slow each other down tenfold."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
