"""Writes this rank's environment to FOLDER/RANK.json, and imports nothing heavy.

usage (under a launcher): write_environment.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
