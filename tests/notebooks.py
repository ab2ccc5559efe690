"""Executes the notebooks in a kernel of this very interpreter; as a command, writes their outputs into them.

python -m tests.notebooks [NAME ...]      # on an idle machine: some outputs are measured times
"""

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HIDDEN = ("PYTEST_CURRENT_TEST", "PYTHONPATH", "MPLBACKEND")
"""Under pytest a kernel leaves out what subprocesses print; and without the path, the notebook finds the project."""
SIZE = 300_000
"""Bytes that a notebook with its outputs may have."""
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}
"""Without ipywidgets, which draws progress bars, nothing is lost."""
ENVIRONMENT = {
    "COLUMNS": "120",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "DS_RECIPES_SCRIPTS": str(ROOT),
}


class OnlyThisInterpreter(KernelSpecManager):
    """Knows one kernel, which is registered nowhere: this interpreter."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return it, whatever the name."""
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


class Kernel(AsyncKernelManager):
    """A kernel of this interpreter; nbclient makes and ends it."""

    def __init__(self, **options):
        super().__init__(kernel_spec_manager=OnlyThisInterpreter(), **options)


def execute(notebook: NotebookNode, folder: Path, timeout: int = 240) -> None:
    """Execute a notebook from top to bottom, as if Jupyter were started in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN} | QUIET
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_manager_class=Kernel, resources=resources).execute(env=environment)


def outputs(notebook: NotebookNode) -> dict[str, list[Any]]:
    """Return the outputs of each code cell by its id."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def kinds(shown: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return what kinds of output a cell has: streams by name, once however often it wrote, data by MIME types."""
    found: list[Any] = []
    for output in shown:
        kind = output.get("name") or (output["output_type"], *sorted(output.get("data", ())))
        if kind not in found[-1:]:
            found.append(kind)
    return found


def clean(notebook: NotebookNode) -> None:
    """Make outputs those of any machine: no paths of this one, no names of its host and user, no progress bars."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        joined: list[NotebookNode] = []
        for output in cell.outputs:
            if "text" in output and joined and joined[-1].get("name") == output.name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        for output in joined:
            if "text" in output:
                output.text = neutral(output.text)
            for kind in [kind for kind in output.get("data", {}) if kind.startswith("text/")]:
                output.data[kind] = neutral(output.data[kind])
        cell.outputs = joined


def neutral(text: str) -> str:
    """Return text as another machine would have printed it."""
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    text = "\n".join(line.rstrip() for line in lines)
    for private, general in (
        (sys.executable, "python"),
        (f"{sys.prefix}/bin/", ""),
        (f"{ROOT}/", ""),
        (str(ROOT), "."),
        (str(Path.home()), "~"),
    ):
        text = text.replace(private, general)
    return re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on localhost", text)


def private() -> list[str]:
    """Return what no output may hold."""
    return [str(ROOT), sys.prefix, str(Path.home()), f"/home/{getpass.getuser()}", "/tmp/"]


def main(names: list[str]) -> None:
    """Execute notebooks with the parameters that they have, and write them with their outputs."""
    os.environ |= ENVIRONMENT
    for path in [path for path in NOTEBOOKS if not names or path.stem in names]:
        notebook = nbformat.read(path, as_version=4)
        execute(notebook, ROOT / "notebooks", timeout=1800)
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"{path.stem}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
