"""Ranks run on the GPUs that CUDA_VISIBLE_DEVICES names, and share the cores: the real launcher, told of eight GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_recipes.launching import command
from deepspeed_recipes.recipe.errors import UserError
from tests.ranks import free_port

SAYS = (
    "import os; os.write(1, (os.environ['LOCAL_RANK'] + ' on ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n').encode())"
)


def devices_of_ranks(folder: Path, options: list[str], visible: str) -> list[str]:
    """Return what two ranks say, with a CPU in the place of each GPU: the launcher treats both alike."""
    script = folder / "says.py"
    script.write_text(SAYS)
    launcher = Path(sys.executable).with_name("deepspeed")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_SIZE": "8", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [str(launcher), "--no_local_rank", *options, "--master_port", str(free_port()), str(script)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(line for line in done.stdout.splitlines() if " on " in line and line[0].isdigit())


def test_ranks_get_the_gpus_that_the_user_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    options = command.local_devices(2, gpus=3)
    assert devices_of_ranks(tmp_path, options, "4,5,6") == ["0 on 4,5", "1 on 4,5"]


@pytest.mark.every
def test_num_gpus_alone_would_take_the_first_ones(tmp_path):
    """When this fails, DeepSpeed respects CUDA_VISIBLE_DEVICES, and `local_devices` can go."""
    assert devices_of_ranks(tmp_path, ["--num_gpus", "2"], "4,5") == ["0 on 0,1", "1 on 0,1"]


@pytest.mark.parametrize(("visible", "gpus"), [("", 8), (None, 8), ("4,5", 0)])
def test_without_a_choice_the_launcher_counts(monkeypatch, visible, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command.local_devices(2, gpus) == ["--num_gpus", "2"]


def test_uuids_are_refused_in_a_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=GPU-8932\S+ DeepSpeed's launcher accepts numbers only"):
        command.local_devices(1, 1)


@pytest.mark.parametrize(("asked", "cores", "threads"), [(None, 96, "12"), (None, 4, "1"), ("5", 96, "5")])
def test_ranks_on_gpus_share_the_cores_that_this_process_may_use(monkeypatch, asked, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert command.rank_environment(8, gpus=8)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("gpus", [0, 2])
def test_ranks_run_on_the_cpu_only_where_there_are_no_gpus(gpus, monkeypatch):
    for name in ("DS_ACCELERATOR", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    environment = command.rank_environment(2, gpus)
    assert environment.get("DS_ACCELERATOR") == (None if gpus else "cpu")
    assert environment.get("MALLOC_ARENA_MAX") == (None if gpus else "1")
