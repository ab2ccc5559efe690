"""publish.py: what goes out, what is refused, and what a push that fails leaves behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from huggingface_hub import ModelCard

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import push
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.training.model_folder import expected
from deepspeed_recipes.training.model_folder.base_model import EXPECTED
from tests import ROOT, hub_server
from tests.test_model_folder import exports  # noqa: F401

NAME = "owner/my-model"


@pytest.fixture
def hub():
    with hub_server.serve() as running:
        yield running


@pytest.fixture
def folder(exports, tmp_path):  # noqa: F811
    """Return a copy of an export."""
    return shutil.copytree(exports["whole"], tmp_path / "model")


def publish(hub, *words, token=hub_server.TOKEN, **variables):
    """Run the script against a server; its settings are read when the library is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": "/nonexistent", "HF_TOKEN": token}
    command = [sys.executable, str(ROOT / "scripts" / "publish.py"), *map(str, words)]
    kept |= {name: value for name, value in settings.items() if value} | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True)


def refused(done, *said):
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) <= 2 and all(text in done.stderr for text in said), done.stderr


def test_a_folder_is_shown_and_pushed_and_pushed_again(hub, folder):
    done = publish(hub, folder, NAME, "--private")
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/{NAME}/commit/" in done.stdout and "private" in done.stdout
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert all(name in done.stdout for name in names)
    held = hub.repositories[NAME]
    assert set(held) == names | {".gitattributes"} and hub.private[NAME]
    assert all(held[name] == (folder / name).read_bytes() for name in names - {"README.md"})
    card = held["README.md"].decode()
    assert f'name = "{NAME}"\n' in card and "OWNER/NAME" not in card
    assert ModelCard(card).data.library_name == "transformers"
    assert "OWNER/NAME" in (folder / "README.md").read_text()  # the folder itself stays as it is

    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMine.\n")
    assert publish(hub, folder, NAME).returncode == 0
    assert hub.repositories[NAME]["README.md"].decode().endswith("Mine.\n")


def test_a_dry_run_sends_nothing_and_needs_neither_token_nor_torch(hub, folder, tmp_path):
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    done = publish(hub, folder, NAME, "--dry-run", token="", PYTHONPATH=f"{ROOT / 'src'}:{tmp_path}")
    assert done.returncode == 0 and "model.safetensors" in done.stdout and "nothing was uploaded" in done.stdout
    assert hub.requests == []


def test_bad_input_is_answered_in_a_line_or_two(hub, folder):
    refused(publish(hub, folder, NAME, token=""), "no token", "hf auth login")
    refused(publish(hub, folder, NAME, token="hf_" + "b" * 24), "refuses this token", "401")
    hub.repositories[NAME] = {"config.json": b"{}", "other.bin": b"", "notes.md": b""}
    hub.private[NAME] = False
    refused(publish(hub, folder, NAME), f"{NAME} exists, with other files: notes.md, other.bin; choose another name")
    hub.repositories[NAME] = {"config.json": b"{}"}
    refused(publish(hub, folder, NAME, "--private"), "is public")
    assert hub.repositories[NAME] == {"config.json": b"{}"}
    assert not [asked for asked in hub.requests if not asked.startswith("GET ")]


def test_weights_that_are_not_as_they_were_written_are_refused(hub, folder):
    file = folder / "model.safetensors"
    write_json(folder / EXPECTED, {"tensors": expected.digests(folder)})
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    refused(publish(hub, folder, NAME), "is not as it was written")
    assert NAME not in hub.repositories


def test_a_hub_that_cannot_be_reached_is_named():
    said = r"owner/my-model: the Hub cannot be reached \(ConnectError: refused\)"
    with pytest.raises(UserError, match=said), push._explained(NAME):
        raise httpx.ConnectError("refused")


@pytest.mark.parametrize("place", ["/preupload/", "/lfs/objects/batch", "/commit/"])
def test_a_push_that_fails_leaves_no_repository_behind(hub, folder, place):
    hub.fails_at = place
    refused(publish(hub, folder, NAME), "the Hub answered 422")
    assert "POST /api/repos/create" in hub.requests and NAME not in hub.repositories


def test_a_push_that_fails_leaves_what_was_there_before(hub, folder):
    assert publish(hub, folder, NAME).returncode == 0
    before = dict(hub.repositories[NAME])
    write_json(folder / "config.json", read_json(folder / "config.json") | {"use_cache": False})
    hub.fails_at = "/commit/"
    refused(publish(hub, folder, NAME), "the Hub answered 422")
    assert hub.repositories[NAME] == before


WRONG = {
    "optimizer.pt": ("x", "optimizer.pt: not part of a model"),
    ".env": ("A=1", ".env: not part of a model"),
    "notes/plan.md": ("x", "notes/plan.md: not part of a model"),
    "run.py": ("x", "run.py: not part of a model"),
    "LICENSE": ("password=correct-horse-battery", "credential"),
    "chat_template.jinja": ("hf_" + "c" * 24, "credential"),
    "model.safetensors": ("x" * 99, "model.safetensors: "),
    "tokenizer.json": ("{", "tokenizer.json"),
    "config.json": ('{"_name_or_path": "/home/me/secret-project/base"}', "a path on this machine"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_model_and_what_must_stay_here_is_refused(folder, name, capsys):
    text, said = WRONG[name]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    assert run_command("publish", [str(folder), NAME, "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and len(printed.err.splitlines()) == 1 and not printed.out
    assert text not in printed.err or text == "x"


def test_a_models_own_code_is_published_with_it(folder, capsys):
    for name in ("modeling_ours.py", "words.tiktoken"):
        (folder / name).write_text("x = 1\n")
    write_json(
        folder / "config.json", read_json(folder / "config.json") | {"auto_map": {"AutoModel": "modeling_ours.A"}}
    )
    assert run_command("publish", [str(folder), NAME, "--dry-run"]) == 0
    assert {"modeling_ours.py", "words.tiktoken"} <= set(capsys.readouterr().out.split())


def test_a_link_and_a_variable_that_is_a_credential_are_refused(folder, refusal, monkeypatch):
    (folder / "LICENSE").symlink_to(Path.home())
    assert "LICENSE: not part of a model" in refusal("publish", folder, NAME, "--dry-run")
    (folder / "LICENSE").unlink()
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    (folder / "merges.txt").write_text("a b\ncorrect-horse-battery\n")
    assert "merges.txt: has text that looks like a credential" in refusal("publish", folder, NAME, "--dry-run")


def test_no_model_an_adapter_that_nobody_can_use_and_no_name(exports, tmp_path, refusal):  # noqa: F811
    for words, said in (
        ([tmp_path / "nowhere", NAME], "no such folder"),
        ([tmp_path, NAME], "not a model folder"),
        ([exports["adapter"], NAME], "which is not on the Hub"),
        ([exports["whole"], "my-model"], "name the owner too"),
        ([exports["whole"], "a/b/c"], "not a name for the Hub"),
    ):
        printed = refusal("publish", *words, "--dry-run")
        assert said in printed and len(printed.splitlines()) <= 2, printed
