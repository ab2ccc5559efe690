"""The environment that pdsh takes to the hosts of a run."""

import sys
from collections.abc import Mapping
from pathlib import Path

from ...spec.errors import is_secret
from ...spec.run_folder import RunFolder
from .. import variables


def write_environment(folder: RunFolder, environment: Mapping[str, str]) -> Path:
    """Write the variables that pdsh takes along, in DeepSpeed's format, print their names, and return the file.

    The user's own `~/.deepspeed_env` and `./.deepspeed_env` are included where they do not contradict ours: DeepSpeed
    reads only one file, and `DS_ENV_FILE` makes it this one.
    """
    own: dict[str, str] = {}
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            own |= {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
    taken = {name: value for name, value in own.items() if not is_secret(name, value)}
    taken |= variables.forwarded(environment)
    taken["TORCH_EXTENSIONS_DIR"] = environment["TORCH_EXTENSIONS_DIR"]
    # The ranks look up ninja on the PATH. The rest of the PATH is each host's own.
    taken["PATH"] = f"{Path(sys.executable).parent}:$PATH"
    print(f"forwarded: {', '.join(taken)}", flush=True)
    if left := sorted({*own} - {*taken} | {*variables.withheld(environment)}):
        print(f"not forwarded, because they look like secrets: {', '.join(left)}; set them on each host", flush=True)
    file = folder.path / "deepspeed_env"
    file.write_text("".join(f"{name}={value}\n" for name, value in taken.items()), encoding="utf-8")
    return file
