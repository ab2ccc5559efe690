"""What a run does. `run.py` composes the other modules and reads from top to bottom like a cookbook page."""

import logging

# On a CPU with AVX-512 it asks at every import for a package of inference kernels that nothing here needs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
