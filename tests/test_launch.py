"""The launcher as a user meets it: real processes, real signals, real mistakes.

A page run as a script: `python recipes/llama3.py 8b lora ...` is the launcher on that page.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from datasets import Dataset, DatasetDict

from deepspeed_recipes.commands import launch as launch_command
from deepspeed_recipes.commands import script
from deepspeed_recipes.commands.launch import plan as launch_plan
from deepspeed_recipes.launching.options import LaunchOptions
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    step_of,
    write_recipe,
)
from tests import ROOT
from tests.conftest import conversation, shared_buffers
from tests.launching import LAUNCH


@pytest.fixture
def small_run(launcher, model_folder, conversations, tmp_path):
    """Return the launch command of a short fp32 run, and its folder."""
    run = RunFolder(tmp_path / "run")
    overrides = [
        f"model.path={model_folder}",
        f"data.path={conversations}",
        "data.validation=none",
        "data.metric=loss",
        "packing=false",
        "global_batch_size=2",
        "micro_batch_size=1",
        "sequence_length=128",
        "max_steps=400",
        "save_steps=5",
        "logging_steps=1",
        "wandb.mode=disabled",
    ]
    return [*launcher, "tiny", "full", "--output-dir", str(run.path)], overrides, run


def launch(*arguments, **options):
    """Run ds-recipes launch to its end."""
    return subprocess.run([*LAUNCH, *map(str, arguments)], capture_output=True, text=True, timeout=240, **options)


def start(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process, run, step, seconds=180):
    wait_until(process, lambda: any(row["step"] >= step for row in read_jsonl(run.metrics)), seconds)


def wait_until(process, reached, seconds=180):
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)


def processes_of(run):
    """Return every live process that has the run's folder in its command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(run.path) in part for part in process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def ranks_of(run):
    """Return the rank processes: those that run the module themselves, and not as a launcher's argument."""
    # `info`, since a process may end between the search and a second look.
    return [one for one in processes_of(run) if one.info["cmdline"][2:4] == ["-m", "deepspeed_recipes.training.run"]]


@pytest.mark.every
def test_sigkill_on_a_rank_ends_everything_and_sigterm_after_resume_writes_a_checkpoint(small_run):
    command, overrides, run = small_run
    buffers = shared_buffers()
    process = start([*command, *overrides])
    wait_for_step(process, run, 6)
    ranks = ranks_of(run)
    assert len(ranks) == 2
    # Not the rank that logs, and at no particular point of its step.
    victim = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
    victim.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert process.returncode not in (0, 2) and "was killed by SIGKILL" in output, output
    assert not processes_of(run)
    assert shared_buffers() <= buffers
    assert run.metrics.exists() and not run.summary.exists()

    newest = step_of(newest_checkpoint(run))
    process = start([*command, "--resume"])
    # The killed run's later steps are in the file until the launcher removes them, before it starts ranks.
    wait_until(process, lambda: ranks_of(run))
    wait_for_step(process, run, newest + 2)
    for _ in range(2):  # `timeout` signals the process and its group
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 143, output
    assert not processes_of(run)
    stopped = read_json(run.summary)
    checkpoint = newest_checkpoint(run)
    assert stopped == {"stopped": True, "steps": step_of(checkpoint)}
    complete = read_json(checkpoint / COMPLETE)
    assert (complete["step"], complete["world_size"]) == (stopped["steps"], 2)
    steps = [row["step"] for row in read_jsonl(run.metrics)]
    assert steps == list(range(1, stopped["steps"] + 1))

    last = stopped["steps"] + 2
    other = launch("tiny", "full", "--output-dir", run.path, "--resume", "--gpus", 1, f"max_steps={last}")
    assert other.returncode == 0, other.stderr
    assert f"{checkpoint} was written by 2 ranks; converting it for 1" in other.stdout
    assert [row["step"] for row in read_jsonl(run.metrics)] == list(range(1, last + 1))
    summary = read_json(run.summary)
    nobody = {"gpu_allocated_gib": None, "gpu_reserved_gib": None}
    assert summary["predicted"] == {**nobody, "tokens_per_second": None}, "on CPU ranks nobody knows"
    assert summary["measured"] == {**nobody, "tokens_per_second": summary["tokens_per_second"]}


def test_list_is_quick_and_imports_no_torch(capsys):
    code = (
        "import sys, time; sys.argv = ['launch.py', '--list', '--json']; start = time.perf_counter()\n"
        f"import runpy; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "try: runpy.run_module('launch', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    variants = {line["variant"] for line in entries if line["family"] == "tiny"}
    assert variants == {
        *("full", "lora", "dpo_lora", "dpo_full", "kto_lora", "orpo_lora", "simpo_lora", "reward", "grpo", "pretrain"),
        *("classify", "embed", "distill"),
    }
    known = {"recipe", "family", "size", "variant", "about", "parameters", "config", "layout"}
    assert len(entries) > 300 and all(line.keys() == known for line in entries)
    (line,) = [line for line in entries if (line["recipe"], line["variant"]) == ("llama3-8b", "full")]
    assert line["parameters"] == 8_030_261_248 and line["config"] == "zero3.json"
    assert line["layout"] == {"tensor": 1, "pipeline": 1, "sequence": 1, "expert": 1}
    launch_command.main(["--list"])
    text = capsys.readouterr().out
    assert "llama3: " in text and "llama3: llama3" not in text and "  sizes         1b, 3b, 8b, 70b" in text


def test_a_closed_pipe_gets_no_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([*LAUNCH, "--list"], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")


def test_dry_run_writes_nothing(tmp_path, capsys, printed_by):
    words = ["tiny", "lora", "lora.rank=8", "learning_rate=2e-3", "--gpus", "2"]
    assert launch_command.main([*words, "--dry-run", "full", "--output-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    text, _, command = said.out.rpartition("}\n")
    recipe = json.loads(text + "}")
    assert (recipe["lora"]["rank"], recipe["learning_rate"]) == (8, 2e-3)
    assert re.search(r"deepspeed .*--num_gpus 2 .*--module deepspeed_recipes.training.run", command)
    scale, unchecked = said.err.splitlines()
    assert scale.startswith("lora.rank=8: ")
    assert unchecked.startswith("not checked by --dry-run: the lengths of examples in tokens,")
    brief = printed_by("launch", *words, "--dry-run").splitlines()
    assert brief[:2] == ["lora.rank: 32 -> 8", "learning_rate: 0.004 -> 0.002"] and "deepspeed" in brief[2]
    assert not (tmp_path / "run").exists()


def test_dry_run_names_the_data_that_it_does_not_read(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("not JSON")
    rows = [{"text": "A text.", "masked": True}]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    capsys.readouterr()  # the progress of writing Parquet
    words = ["tiny", "pretrain", "--dry-run", f"data.path={tmp_path}/train.jsonl,{tmp_path}/train.parquet,OWNER/NAME"]
    assert launch_command.main([*words, f"data.validation={tmp_path}/data"]) == 0
    said = capsys.readouterr()
    for name in ("train.jsonl", "train.parquet"):
        assert f"{tmp_path}/{name}: keys that nothing reads, with their numbers of examples: masked (1)\n" in said.out
    (line,) = said.err.splitlines()
    read = f"{tmp_path}/train.parquet after row 1,000, OWNER/NAME, {tmp_path}/data (read by the ranks); "
    assert line.startswith(f"not checked by --dry-run: {read}the lengths of examples in tokens")
    file = tmp_path / "scheduled.json"
    scheduler = {"type": "WarmupLR", "params": {}}
    block = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "scheduler": scheduler}
    file.write_text(json.dumps(block))
    assert launch_command.main(["tiny", "full", "--dry-run", f"deepspeed={file}"]) == 0
    with pytest.raises(UserError, match=r"schedule.kind: the scheduler block of .*scheduled.json replaces it"):
        launch_command.main(["tiny", "full", "--dry-run", f"deepspeed={file}", "schedule.kind=linear"])
    streamed = [f"data.path={tmp_path}/train.jsonl", "data.streaming=true", "max_steps=2", "data.validation=none"]
    assert launch_command.main(["tiny", "pretrain", "--dry-run", *streamed, "data.validation_share=0"]) == 0
    assert "examples after the first 1,000 (read by the ranks)" in capsys.readouterr().err


def test_two_launches_choose_different_ports(capsys):
    for _ in range(2):
        launch_command.main(["tiny", "full", "--dry-run"])
    ports = set(re.findall(r"--master_port (\d+)", capsys.readouterr().out))
    assert len(ports) == 2 and "29500" not in ports


MISTAKES = {
    "recipe": (["tyni", "full"], "tiny"),
    "size": (["tiny-7b", "full"], "3m"),
    "variant": (["tiny", "ful"], "full"),
    "no variant": (["qwen3-8b"], "qwen3-8b: name a variant too: full, lora,"),
    "long rows": (["tiny", "full", "sequence_length=2048"], "sequence_length=2048: the model has 1,024 positions"),
    "no model": (["tiny", "full", f"model.path={ROOT / 'configs'}"], "this folder has no config.json"),
    "no data": (["tiny", "full", f"data.path={ROOT / '.ci'}"], "no data files in this folder"),
    "nothing": ([], "--list"),
    "two recipes listed": (["--list", "llama3", "qwen3"], "--list: lists all recipes, or those of one page; leave"),
    "a variant listed": (["tiny", "lora", "--list", "--draft"], "leave out lora --draft."),
    "a list that is not asked for": (["tiny", "full", "--json"], "--json: only with --list; --dry-run full prints"),
    "key": (["tiny", "full", "learning_rat=1"], "learning_rate"),
    "another launcher's option": (["tiny", "full", "--learning_rate", "a"], "learning_rate=a: must be a number"),
    "foreign keys": (
        ["tiny", "full", "loss_type=ipo", "a", "bf16=false"],
        "'dpo.loss'.\nunknown key 'bf16'; use 'prec",
    ),
    "a section": (["tiny", "full", "data=a", "wandb=false"], "'data.path'.\nunknown key 'wandb'; use 'tracking'"),
    "not an override": (["tiny", "full", "fast"], "key=value"),
    "type": (["tiny", "full", "epochs=many"], "epochs=many"),
    "choice": (["tiny", "full", "precision=fp8"], "bf16"),
    "attention": (["tiny", "full", "model.attention=flash"], "=flash: must be one of auto, eager, sdpa, varlen,"),
    "blanks": (["tiny", "full", "max_steps", "=", "3"], "=: write key=value without blanks, e.g. max_steps=3."),
    "a YAML list": (
        ["tiny", "lora", "lora.target_modules=[q_proj, 'v_proj']"],
        "write the values alone, separated by commas: lora.target_modules=q_proj,v_proj",
    ),
    "a dash of a web page": (["tiny", "full", "\u2013dry-run"], "a dash that is not a hyphen; write --dry-run."),
    "a home folder": (["tiny", "full", "data.path=~/b.jsonl,a.jsonl"], str(Path.home() / "b.jsonl")),
    "negative": (["tiny", "full", "learning_rate=-1"], "above 0"),
    "batch": (["tiny", "full", "micro_batch_size=3", "global_batch_size=8"], "multiple"),
    "world": (["tiny", "full", "--gpus", "3"], "multiple"),
    "no ranks": (["tiny", "full", "--gpus", "0"], "--gpus"),
    "layout": (["tiny", "full", "layout.tensor=3"], "use layout.tensor=2"),
    "config": (["tiny", "full", "deepspeed=zero9.json"], "zero3.json"),
    "config without its ending": (["tiny", "full", "deepspeed=zero33"], "Did you mean zero3.json?"),
    "data": (["tiny", "full", "data.path=missing.jsonl"], "missing.jsonl"),
    "model": (["tiny", "full", "model.path=./missing"], "./missing"),
    "modules": (["tiny", "lora", "lora.target_modules=q_prj"], "has no module q_prj; it has down_proj, embed_tokens"),
    "parameters": (
        ["olmoe", "lora", "--draft", "lora.target_parameters=mlp.experts.up"],
        "the model has no parameter mlp.experts.up; it has down_proj, gate_up_proj, weight.",
    ),
    "nothing to resume": (["tiny", "full", "--resume", "--output-dir", "nowhere"], "nothing to resume"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_a_line_and_leave_nothing_behind(mistake, tmp_path, refused):
    arguments, hint = MISTAKES[mistake]
    said = refused(*arguments)
    assert hint in said and len(said.strip().splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_variables_of_wandb_are_settings_unless_others_are_given(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_TAGS", "a,b")
    ours = LaunchOptions("tiny", "full", ("wandb.project=mine", "tracking=wandb"))
    wandb = launch_plan.requested(ours).recipe.wandb
    assert (wandb.mode, wandb.project, wandb.tags) == ("offline", "mine", "a,b")
    assert capsys.readouterr().err == "WANDB_MODE: wandb.mode=offline\nWANDB_TAGS: wandb.tags=a,b\n"
    without = launch_plan.requested(replace(ours, overrides=("tracking=none",)))
    assert without.recipe.wandb.mode == "online" and not capsys.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "shared")
    with pytest.raises(UserError, match=r"wandb\.mode=shared"):
        launch_plan.requested(ours)


def test_a_run_among_its_data_is_refused(tmp_path, refused):
    (tmp_path / "a.jsonl").write_text(json.dumps(conversation("a?", "Yes.")) + "\n")
    said = refused("tiny", "full", "data.path=.", "--output-dir", "run", "--dry-run")
    assert f"{tmp_path / 'run'}: the run would be inside {tmp_path}, whose files are all read as data" in said
    assert "would be inside" not in refused("tiny", "full", "data.path=a.jsonl", "--output-dir", "run", "max_steps=-1")


def test_a_mistake_ends_the_script_with_status_2(tmp_path):
    done = launch("tyni", "full", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch.py: unknown recipe 'tyni'; did you mean 'tiny'?"), done.stderr


def test_a_sample_in_place_of_your_data_is_named(capsys):
    for words, said in (
        ("llama3-8b full --gpus 8", True),
        ("tiny full --gpus 1", False),
        ("llama3-8b full --draft --gpus 1", False),
    ):
        assert launch_command.main([*words.split(), "--dry-run"]) == 0
        assert ("data.path is not set: extract/train.jsonl, a sample" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("splits", "more", "held_out"),
    [
        (("train", "test"), "", "test"),
        (("train", "test", "validation"), "", "validation"),
        (("train", "test"), "data.validation=none", None),
        (("train", "test"), "data.validation_share=0.2", None),
        (("train", "other"), "", None),
    ],
)
def test_a_saved_data_sets_own_split_is_held_out(splits, more, held_out, tmp_path, printed_by):
    rows = Dataset.from_list([{"prompt": "a", "completion": "b"}] * 4)
    DatasetDict(dict.fromkeys(splits, rows)).save_to_disk(tmp_path / "saved")
    words = ["tiny", "full", f"data.path={tmp_path}/saved", *more.split(), "--dry-run", "full"]
    printed = printed_by("launch", *words)
    assert (f"data.validation={tmp_path}/saved/" in printed) == bool(held_out)
    if held_out:
        assert f"data.validation={tmp_path}/saved/{held_out}: that split is held out" in printed


@pytest.mark.parametrize(("more", "said"), [("", True), (" lora.target_parameters=none", False)])
def test_a_pages_experts_that_keep_adapters_are_named(more, said, capsys):
    words = f"mixtral-8x7b lora --draft --gpus 1 lora_target=q_proj,v_proj --dry-run{more}".split()
    assert launch_command.main(words) == 0
    assert ("from the page, have adapters too" in capsys.readouterr().err) == said


LINE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
BAD_DATA = {
    "empty": (b"", "empty"),
    "not utf-8": (LINE.encode() + b'{"messages": "\xff"}\n', ":2: not UTF-8"),
    "not json": (LINE.encode() * 2 + b'{"messages": [\n', ":3: not JSON"),
    "not an object": (b"[1]\n", ":1: a list"),
    "deep": (b"[" * 100_000 + b"\n", ":1: not JSON"),
    "no field": (LINE.encode() + b'{"text": "a"}\n', "'messages'"),
    "no content": (b'{"messages": [{"role": "user"}]}\n', "'content'"),
    "no assistant": (LINE.encode() + b'{"messages": [{"role": "user", "content": "a"}]}\n', ":2: no assistant turn"),
}


@pytest.mark.parametrize("mistake", BAD_DATA)
def test_bad_data_is_refused_before_anything_starts(mistake, tmp_path, refused):
    content, hint = BAD_DATA[mistake]
    (tmp_path / "bad.jsonl").write_bytes(content)
    said = refused("tiny", "full", "data.path=bad.jsonl", "--output-dir", "run")
    assert "bad.jsonl" in said and hint in said
    assert not (tmp_path / "run").exists()


def test_a_config_that_would_fail_or_mislead_is_named_before_the_launch(tmp_path, refused, printed_by):
    config = json.loads((ROOT / "configs" / "zero2.json").read_text())
    (tmp_path / "wrong.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 2, "stag": 3}}, indent=1))
    wrong = refused("tiny", "full", "deepspeed=wrong.json", "--output-dir", "run")
    assert "zero_optimization.stag" in wrong and len(wrong.strip().splitlines()) <= 3
    (tmp_path / "cut.json").write_text('{"zero_optimization": {')
    assert "cut.json" in refused("tiny", "full", "deepspeed=cut.json", "--output-dir", "run")
    del config["gradient_clipping"]
    (tmp_path / "silent.json").write_text(json.dumps(config))
    assert "gradient_clipping" in printed_by("launch", "tiny", "full", "deepspeed=silent.json", "--dry-run")
    assert not (tmp_path / "run").exists()


def test_the_projects_own_config_is_not_warned_of_for_a_vision_model(capsys):
    assert launch_command.main(["tiny_vision", "full", "--dry-run"]) == 0
    assert "warning" not in "".join(capsys.readouterr())


def test_another_recipes_folder_is_left_alone(tmp_path, refused):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, pages.find("tiny", "lora"))
    for extra in ([], ["--resume"]):
        assert "tiny-3m-lora" in refused("tiny", "full", "--output-dir", run.path, *extra)
    assert "--resume" in refused("tiny", "lora", "--output-dir", run.path)
    run.recipe.rename(run.path / "notes.txt")
    assert "not a run folder" in refused("tiny", "lora", "--output-dir", run.path)
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


@pytest.mark.every
def test_a_mistake_found_by_the_ranks_leaves_nothing_behind(small_run):
    """Only they count tokens."""
    command, overrides, run = small_run
    done = subprocess.run([*command, *overrides, "sequence_length=8"], capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("examples are longer than sequence_length=8; sequence_length=") == 1
    assert "exits with return code" not in done.stdout, "the launcher's last line hides the reason"
    assert not run.path.exists()


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_a_model_of_the_hub_is_refused_before_ranks_start(tmp_path, offline):
    words = ("qwen2_5-0.5b", "lora", "--no-plan", "--output-dir", "run")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "cache")}
    done = launch(*words, env=os.environ | nowhere, cwd=tmp_path)
    assert done.returncode == 2 and "etry" not in done.stdout + done.stderr and "deepspeed" not in done.stdout
    assert "model.path=Qwen/Qwen2.5-0.5B-Instruct: no network, and not in the cache; download it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_credentials_never_reach_the_run_folder_or_the_screen(tmp_path):
    token = "hf_" + "a1B2" * 8
    key = "0123456789" * 4
    environment = os.environ | {"HF_TOKEN": token, "WANDB_API_KEY": key}
    done = launch("tiny", "full", f"wandb.projct={key}", "x" + token, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert token not in done.stdout + done.stderr and key not in done.stdout + done.stderr


PAGE = ROOT / "recipes" / "llama3.py"


def run(page, *words, folder, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    command = [sys.executable, str(page), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_page_shows_the_run_that_it_would_start(tmp_path):
    done = run(PAGE, "1b", "lora", "--dry-run", "--gpus", "2", "learning_rate=3e-4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/runs/llama3-1b-lora/" in done.stdout and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0)])
def test_a_page_lists_its_sizes_and_variants(tmp_path, words, status):
    done = run(PAGE, *words, folder=tmp_path)
    assert done.returncode == status and not done.stderr
    assert "\n  405b " in done.stdout and "\n  qlora " in done.stdout and "usage: python llama3.py SIZE" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["8bb", "lora"], "llama3.py: unknown size '8bb'; did you mean 8b? There are: 1b, 3b, 8b, 70b, 405b."),
        (["lora", "8b"], "llama3.py: lora: the size comes before the variant; sizes are: 1b, 3b, 8b, 70b, 405b."),
        (["8b", "lorra"], "llama3.py: unknown variant of llama3 'lorra'; did you mean 'lora'?"),
    ],
)
def test_a_mistake_is_answered_with_the_nearest(tmp_path, words, message):
    done = run(PAGE, *words, folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message) and len(done.stderr.splitlines()) <= 3


def test_a_page_anywhere_is_a_script_and_needs_no_size_if_it_has_one(tmp_path):
    text = (ROOT / "recipes" / "tiny.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    (tmp_path / "json").mkdir()  # a folder of the user's with a library's name
    done = run(tmp_path / "mine.py", "lora", "--dry-run", folder=tmp_path)
    assert done.returncode == 0 and f"{tmp_path}/runs/mine-3m-lora/" in done.stdout, done.stderr
    for words, said in (("2b lora", "unknown size '2b'; there are: 3m."), ("lora 3m", "the size comes before the var")):
        with pytest.raises(UserError, match=said):
            script.main([str(tmp_path / "mine.py"), *words.split()])


def test_a_python_without_the_package_prints_what_to_run():
    pages = [page for page in sorted((ROOT / "recipes").glob("*.py")) if page.name != "plain_loop.py"]
    assert len(pages) > 30
    for page in pages:
        done = subprocess.run([sys.executable, "-I", "-S", page], capture_output=True, text=True)
        assert done.returncode == 1 and "Run `make install`, then .venv/bin/python" in done.stderr, page.name


def test_a_page_from_before_the_move_says_what_to_change(tmp_path):
    page = tmp_path / "old.py"
    page.write_text("from .spec.recipe import Model\nSIZES = {'1b': Model(path='a')}\n", encoding="utf-8")
    command = [sys.executable, ROOT / "scripts" / "launch.py", f"{page}-1b", "lora", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{page}:1: " in done.stderr and "deepspeed_recipes.recipe" in done.stderr
