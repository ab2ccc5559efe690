"""Measures the time per byte of an all-reduce between a machine's ranks, started by DeepSpeed's launcher.

    deepspeed --no_local_rank --num_gpus 2 --module deepspeed_recipes.benchmarks.link

Rank 0 prints `{"seconds_per_byte": ...}`, the median of `REPEATS` messages.
"""

import json
import statistics
import time

import torch
import torch.distributed as dist

from ..training import distributed

SIZE = 16 * 2**20
"""Bytes of a message: as large as ZeRO's buckets, so that latency is negligible."""
WARM_UP, REPEATS = 3, 10


def main() -> None:
    """Measure and print."""
    distributed.start()
    message, times = torch.ones(SIZE // 4), []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        times.append(time.perf_counter() - start)
    if distributed.is_first():
        print(json.dumps({"seconds_per_byte": statistics.median(times[WARM_UP:]) / SIZE}), flush=True)
    distributed.stop()


if __name__ == "__main__":
    main()
