"""Imports PEFT without bitsandbytes; must precede anything that imports PEFT, which transformers' Trainer does.

PEFT 0.21.2 imports bitsandbytes in its helpers if it is installed: a second and 45 MB per rank for runs without 4-bit
weights. Runs with 4-bit weights import it afterwards. `test_peft_imports_bitsandbytes` fails once this can be
removed.
"""

import importlib
import sys

if "peft" not in sys.modules and "bitsandbytes" not in sys.modules:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # makes `import bitsandbytes` an ImportError
    importlib.import_module("peft")
    del sys.modules["bitsandbytes"]
