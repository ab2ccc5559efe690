"""The launcher, with forked ranks below it instead of DeepSpeed's own: seconds of imports less per rank."""

import sys
from pathlib import Path

from recipes.launching import supervise
from recipes.spec.run_folder import read_json
from scripts import launch
from tests.ranks import free_port

TOLD = "pids.json"
"""In the run folder: forks do not show their environment, so the process that forks them says which rank each is."""


def command(folder, ranks):
    folder.path.joinpath(TOLD).unlink(missing_ok=True)
    ranks_and_port = ["-m", "tests.workers.forked_ranks", str(ranks), str(free_port())]
    return [sys.executable, *ranks_and_port, supervise.RANK_MODULE, str(folder.path)]


def find(launcher, known):
    file = Path(sys.argv[sys.argv.index("--output-dir") + 1], TOLD)
    told = read_json(file) if file.exists() else []
    return [(pid, rank) for pid, rank in told if pid not in known and Path(f"/proc/{pid}").exists()]


if __name__ == "__main__":
    launch.deepspeed_command, supervise.find = command, find
    sys.exit(launch.main(sys.argv[1:]))
