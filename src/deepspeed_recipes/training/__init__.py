"""The code that each rank executes. Start with `run.py`, which is one run from top to bottom."""

import logging

# On a CPU with AVX-512, every import warns about a missing package of inference kernels, which nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
