"""A damaged checkpoint is named and skipped; an intact one is not."""

import os
import random

import pytest

from deepspeed_recipes.launching import restarts
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import COMPLETE, RunFolder, newest_checkpoint, sizes, step_of, write_json
from deepspeed_recipes.training.checkpoint import digests

FILES = ("model.safetensors", "rng_state_0.pth", "global_step/zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.fixture
def run(tmp_path):
    """Write two complete checkpoints of files that are larger than a block."""
    run, draw = RunFolder(tmp_path), random.Random(0)
    for step in (5, 10):
        folder = run.checkpoints / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        for name in FILES:
            (folder / name).write_bytes(draw.randbytes(2**18 + 1000))
        found = {name: digests.of_file(folder / name) for name in FILES}
        write_json(folder / COMPLETE, {"step": step, "world_size": 2, "files": sizes(folder), "digests": found})
    return run


def flip(file, bit):
    """Change a single bit of a file and leave its size and time."""
    held, content = file.stat(), bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))


def test_an_intact_checkpoint_is_taken(run, capsys):
    assert step_of(digests.newest_intact(run)) == 10
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_named_and_the_older_checkpoint_is_taken(run, capsys, name, where):
    file = run.checkpoints / "checkpoint-10" / name
    flip(file, int(where * (8 * file.stat().st_size - 1)))
    assert step_of(newest_checkpoint(run)) == 10  # the sizes show nothing
    assert step_of(digests.newest_intact(run)) == 5
    said = capsys.readouterr().err
    assert f"{file} is damaged" in said and said.count("\n") == 1
    assert step_of(newest_checkpoint(run)) == 5  # what the ranks take


def test_without_an_intact_checkpoint_the_run_cannot_be_resumed(run):
    for step in (5, 10):
        flip(run.checkpoints / f"checkpoint-{step}" / FILES[2], 77)
    with pytest.raises(UserError, match="has no complete checkpoint"):
        restarts.intact_checkpoint(pages.find("tiny", "full"), run)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"files": 3}', b'{"step": 10, "files": {"a'])
def test_an_unreadable_complete_json_does_not_block_an_older_checkpoint(run, content):
    (run.checkpoints / "checkpoint-10" / COMPLETE).write_bytes(content)
    assert step_of(newest_checkpoint(run)) == 5
    assert step_of(digests.newest_intact(run)) == 5
