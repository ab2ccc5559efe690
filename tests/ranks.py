"""Real ranks for tests: forks of a process that has imported the stack and every worker that needs it."""

from deepspeed_recipes.prove.ranks import Ranks, free_port, read_logs

__all__ = ["PRELOADED", "Ranks", "free_port", "read_logs"]

PRELOADED = ("tests.preload", "tests.workers.use_config")
