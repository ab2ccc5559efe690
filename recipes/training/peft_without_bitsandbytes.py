"""Import PEFT without bitsandbytes; import this before anything that imports PEFT, which transformers' Trainer does.

PEFT 0.21.2 imports bitsandbytes in its helpers wherever it is installed: a second and 45 MB per rank for runs without
4-bit weights. Those that have some import it afterwards. `test_peft_imports_bitsandbytes` tells when this can go.
"""

import importlib
import sys

if "peft" not in sys.modules and "bitsandbytes" not in sys.modules:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # makes `import bitsandbytes` an ImportError
    importlib.import_module("peft")
    del sys.modules["bitsandbytes"]
