"""Samples of the other nodes, for trackers: W&B samples only the node of the first rank by itself."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from ...recipe.run_folder import RunFolder

PLACE = ("time", "node", "rank", "step")
"""Keys of a sample with its time and place."""
OF_RANK = ("gpu_", "pcie_", "nvlink_")
"""Prefixes of readings that a rank takes of its own GPU; all others are of its node."""
TAIL = 4096
"""Bytes at the end of a file that contain its newest sample, which has about 600."""


def readings(run: RunFolder) -> dict[str, float]:
    """Return the newest readings of every other node, e.g. `nodes/worker-1/cpu_utilization`.

    Readings of a GPU also have its rank's number: `nodes/worker-1/rank-8/gpu_utilization`. Units as in system.jsonl.
    """
    found: dict[str, float] = {}
    for path in sorted(run.ranks.glob(run.system_of("*").name)):
        sample = _newest(path)
        if sample.get("node", socket.gethostname()) == socket.gethostname():
            continue
        for name in sample.keys() - set(PLACE):
            rank = f"rank-{sample['rank']}/" if name.startswith(OF_RANK) else ""
            found[f"nodes/{sample['node']}/{rank}{name}"] = sample[name]
    return found


def _newest(path: Path) -> dict[str, Any]:
    """Return the last whole sample in a file, or an empty one if there is none or the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().decode().splitlines(keepends=True)
    except OSError:  # a temporary error of a shared file system
        return {}
    whole = [line for line in lines if line.startswith("{") and line.endswith("}\n")]
    return json.loads(whole[-1]) if whole else {}
