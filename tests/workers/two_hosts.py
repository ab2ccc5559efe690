"""Two hosts on one machine: DeepSpeed's per-host launcher in each of two network namespaces, and the ranks below it.

python -m tests.workers.two_hosts NAMESPACE NAMESPACE ADDRESS_OF_THE_FIRST PORT RANKS_EACH RUN_FOLDER
"""

import base64
import json
import subprocess
import sys
import time


def main(first: str, second: str, address: str, port: str, ranks: str, folder: str) -> int:
    hosts = {first: list(range(int(ranks))), second: list(range(int(ranks)))}
    world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    launchers = []
    for node, host in enumerate(hosts):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "deepspeed.launcher.launch", "--quiet"]
        command += ["--no_local_rank", f"--world_info={world}", f"--node_rank={node}", f"--master_addr={address}"]
        command += [f"--master_port={port}", "--module", "deepspeed_recipes.training.run", folder]
        launchers.append(subprocess.Popen(command))
    while all(launcher.poll() is None for launcher in launchers):
        time.sleep(0.2)
    if any(launcher.poll() for launcher in launchers):  # as ssh's end ends a host's launcher
        for launcher in launchers:
            launcher.terminate()
    return max((launcher.wait() % 256 for launcher in launchers), default=0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
