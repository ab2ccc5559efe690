"""What a user reads: help, the screen of a run, its last line and its plot; and what is left out."""

import importlib.util
import logging
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from transformers import TrainerState

from deepspeed_recipes.commands import launch, main
from deepspeed_recipes.commands.launch import options
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.methods import method
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    append_jsonl,
    best_step,
    judgements,
    write_json,
)
from deepspeed_recipes.training import console
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks.evaluation import Evaluation
from deepspeed_recipes.training.callbacks.metrics import Metrics, TrainingFlops
from deepspeed_recipes.training.data import updates
from deepspeed_recipes.training.data.load import Datasets


def shown(capsys, *words):
    """Return what the launcher prints before it ends well."""
    with pytest.raises(SystemExit) as end:
        launch.main(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_explains_every_key_with_type_default_and_meaning(capsys):
    screen = shown(capsys, "--help")
    known = options.keys()
    assert set(known) == set(overrides.override_keys())
    assert all(key.meaning and key.short() in screen for key in known.values())
    assert not re.search(r"et al\n|e\.g\n", screen) and "(Dettmers et al. 2023, arXiv:2305.14314)" in screen
    assert "typing." not in screen and "true | false | selective | feed_forward (default: true)" in screen
    assert "learning_rate               number (default: 2e-05)" in screen


def test_progress_bars_of_libraries_stay_out_of_a_log():
    load = "from transformers.utils import logging; list(logging.tqdm(range(3), desc='Loading weights'))"
    code = f"from deepspeed_recipes.commands import main; main.run('list', ['--json']); {load}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr


def test_help_of_a_key_says_everything_about_it(capsys, refusal):
    screen = shown(capsys, "--help", "gradient_checkpointing")
    assert screen.startswith("gradient_checkpointing: true | false | selective | feed_forward (default: true)\n    Rec")
    assert "which hold most activations" in " ".join(screen.split()), "all of it, and not the first sentence"
    assert len(re.findall(r"^lora\.", shown(capsys, "tiny", "full", "--help", "lora"), re.MULTILINE)) == 11
    assert "refused: fp8=true with lora!=none: adapters' products" in shown(capsys, "--help", "fp8")
    assert "refused: loss_on!=assistant with method grpo: the model writes" in shown(capsys, "--help", "loss_on")
    assert "Did you mean 'learning_rate'" in refusal("launch", "--help", "learning_rat")
    assert shown(capsys, "--help", "beta").startswith("beta: use dpo.beta.\ndpo.beta: number (default: 0.1)")
    assert shown(capsys, "--help", "bf16").startswith("bf16: use precision (bf16, fp16 or fp32).\nprecision: ")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--dryrun", "--dryrun: no such option; did you mean --dry-run?"),
        ("--nproc_per_node=2", "--nproc_per_node: no such option; did you mean --gpus?"),
        ("--frobnicate=secret", "--frobnicate: no such option; ds-recipes launch --help lists"),
    ],
)
def test_an_unknown_option_leads_to_the_nearest_or_to_a_key(typed, said, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(["tiny", "full", typed])
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and "secret" not in error


def test_other_tools_options_are_left_out_or_answered_together(capsys, refusal):
    theirs = (
        "--overwrite_output_dir tiny lora --train_type lora --per_device_eval_batch_size 1 --stage sft --quant_bits 4"
    )
    several = "--lora_target_modules q_proj v_proj --attn_impl sdpa --greater_is_better False"
    found = options.parse(f"{theirs} {several}".split(), "")
    assert (found.recipe, found.variant) == ("tiny", "lora")
    assert sorted(found.overrides) == [
        *("lora.target_modules=q_proj,v_proj", "model.attention=sdpa", "model.quantization=nf4"),
    ]
    said = capsys.readouterr().err
    assert (
        "train_type=lora is left out: the variant is lora" in said and "batch_size=1 is left out: micro_batch" in said
    )
    assert options.parse(["tiny", "lora", "neat_packing=true", "loftq_config=None"], "").overrides == ["packing=true"]
    assert not options.parse(["tiny", "lora", "--push_to_hub", "false"], "").overrides
    found = options.parse(["tiny", "grpo", "--scale_rewards", "false"], "")
    assert found.overrides == ["grpo.scale=none"]
    words = ["tiny", "lora", "--train_type", "full", "--namespace", "ml", "--rlhf_type", "dpo", "data.path=x.jsonl"]
    said = refusal("launch", *words)
    assert (
        all(f"unknown key {key!r}; " in said for key in ("train_type", "namespace", "rlhf_type")) and "ml" not in said
    )


def test_keys_can_be_typed_as_options(capsys, refusal):
    words = ["--learning_rate", "1e-4", "tiny", "--use-dora", "lora", "--seed=7", "--warmup_ratio", "0.1", "--packing"]
    found = options.parse([*words, "false", "--lora.rank", "4", "--gpus", "2"], "")
    assert (found.recipe, found.variant, found.gpus) == ("tiny", "lora", 2)
    keys = ["learning_rate=1e-4", "lora.dora=true", "seed=7", "schedule.warmup=0.1", "packing=false", "lora.rank=4"]
    assert found.overrides == keys
    assert "warmup_ratio is read as schedule.warmup" in capsys.readouterr().err
    found = options.parse(["tiny", "lora", "--bf16", "output_dir=x", "load_in_4bit=true"], "")
    assert found.overrides == ["model.quantization=nf4", "precision=bf16"] and found.output_dir == Path("x")
    habits = [
        "train_on_inputs=False",
        "optim=adamw_torch",
        "metric_for_best_model=eval_loss",
        "eval_strategy=no",
        "save_strategy=epoch",
        "overwrite_output_dir=true",
        "dataset_num_proc=4",
        "template=qwen3",
        "torch_dtype=bfloat16",
        "zero_stage=2",
    ]
    ours = ["loss_on=assistant", "optimizer=adamw", "data.metric=loss", "eval_steps=none", "save_steps=epoch"]
    ours += ["precision=bf16", "deepspeed=zero2.json"]
    assert options.parse(["tiny", "lora", *habits, "save_strategy=steps"], "").overrides == ours
    assert options.parse(["tiny", "lora", "bf16=false"], "").overrides == ["bf16=false"], "which is answered"
    for words, resumes in (
        (["resume_from_checkpoint=true"], True),
        (["--resume_from_checkpoint", "True"], True),
        (["--resume_from_checkpoint=false"], False),
    ):
        found = options.parse(["tiny", "lora", *words, "seed=7"], "")
        assert (found.resume, found.overrides) == (resumes, ["seed=7"])
    batch = ["tiny", "full", "gradient_accumulation_steps=4", "micro_batch_size=2", "--gpus", "2", "--dry-run"]
    assert launch.main(batch) == 0
    assert "is read as global_batch_size=16: 2 x 4 x 2 data-parallel ranks" in capsys.readouterr().err
    assert "use 'global_batch_size'" in refusal("launch", *batch, "global_batch_size=8")
    assert shown(capsys, "--help", "num_train_epochs").startswith("epochs: ")
    for word, said in (("--beta=0.1", "unknown key 'beta'; use 'dpo.beta'"), ("--seed", "seed=true: must be")):
        assert said in refusal("launch", "tiny", "full", "--dry-run", word)


def test_a_command_that_is_interrupted_ends_with_a_line(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepspeed_recipes.commands.generate.main", interrupted)
    assert main.run("generate", ["a"]) == 130
    assert capsys.readouterr().err.endswith("generate.py: stopped.\n")


def test_one_family_is_listed(printed_by):
    screen = printed_by("launch", "--list", "gpt2")
    assert screen.startswith("gpt2: ") and "355m" in screen and "llama3" not in screen
    assert main.run("launch", ["--list", "gpt3"]) == 2


@pytest.mark.parametrize("place", ["file/run", "file/deep/run", "/proc/run"])
def test_an_output_folder_that_cannot_be_written_is_named_in_a_line(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main.run("launch", ["tiny", "full", "--output-dir", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--output-dir" in line and place in line and "cannot be written: " in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, ""),
        ({"accuracy": 0.75}, "accuracy 75%  "),
        ({"reward": None}, "reward -  "),  # all functions failed
        ({"rewards/accuracies": 0.75, "rewards/margins": 0.256}, "reward accuracy 75%  reward margin 0.26  "),
    ],
)
def test_the_line_of_a_step_has_a_methods_own_numbers(alone, tmp_path, capsys, own, said):
    """Those of pairs by other names than of held-out pairs, which are ranked by the likelihoods alone."""
    metrics = Metrics(RunFolder(tmp_path), lambda record: None, True, TrainingFlops(1.0, 1.0))
    with metrics.waiting():
        pass
    logs = {"loss": 0.6, "learning_rate": 1e-3, "grad_norm": 1.0, **own}
    metrics.on_log(None, TrainerState(global_step=3, max_steps=10), None, logs)
    assert f"step  3/10  loss 0.6000  {said}lr 1.0e-03  grad norm 1.00  0 tokens/s  " in capsys.readouterr().out


def test_the_curve_of_the_loss_says_of_what_it_is():
    losses = {
        method: pages.find("tiny", method).method.curve
        for method in ("full", "dpo_lora", "reward", "classify", "embed")
    }
    assert losses == {
        "classify": "cross-entropy per text (nats)",
        "embed": "InfoNCE per anchor (nats)",
        "full": "loss per token (nats)",
        "dpo_lora": "DPO loss per pair (nats)",
        "reward": "ranking loss per pair (nats)",
    }


def test_preferences_are_judged_by_accuracy_and_margin(tmp_path):
    recipe = pages.find("tiny", "dpo_lora")
    recipe = replace(recipe, data=replace(recipe.data, metric="loss"))  # which pairs do not have
    run = RunFolder(tmp_path)
    for step, accuracy, margin in ((0, 0.5, 0.125), (8, 1.0, 3.5)):
        row = {"step": step, "preference_accuracy": accuracy, "preference_margin": margin}
        append_jsonl(run.evaluations, row)
    evaluation = Evaluation(recipe, run, Datasets([], [{}] * 4, None, []), None, None, print)
    said = "preference accuracy on 4 held-out examples: 50.0% -> 100.0%, margin 0.12 -> 3.50 nats"
    assert evaluation.last_line(1.0) == said and evaluation.warning(1.0) is None
    longer = (
        "warning: most of the better answers are less likely than the others, as longer answers are; their margin, "
    )
    assert evaluation.warning(0.4).startswith(f"{longer}which DPO trains, rose by 3.38 nats.\n")
    append_jsonl(run.evaluations, {"step": 9, "preference_accuracy": 0.0, "preference_margin": 0.0})
    assert evaluation.warning(0.4) is None


def test_a_score_from_before_on_other_examples_or_by_another_metric_is_not_shown(tmp_path):
    recipe, run = pages.find("tiny", "full"), RunFolder(tmp_path)
    for row in ({"step": 0, "loss": 8.0}, {"step": 2, "loss": 6.0}):
        append_jsonl(run.evaluations, row | {"held_out": "first"})

    def judge(metric, **row):
        append_jsonl(run.evaluations, row)
        given = replace(recipe, data=replace(recipe.data, metric=metric), keep_best=True)
        evaluation = Evaluation(given, run, Datasets([], [{}] * 4, None, []), None, None, print)
        assert evaluation.warning(row[metric]) is None
        return evaluation.last_line(row[metric]), evaluation.before(), judgements(run, given)

    same = judge("loss", step=4, loss=5.0, held_out="first")
    assert same == ("loss on 4 held-out examples: 8.0000 -> 5.0000", 8.0, {2: (6.0, 6.0), 4: (5.0, 5.0)})
    unknown = "{} on 4 held-out examples: {} (before training: not measured)"
    # Asked for another metric when it resumed.
    line, before, found = judge("exact_match", step=5, loss=4.0, exact_match=0.5, held_out="first")
    assert (line, before, list(found)) == (unknown.format("exact match", "50.0%"), None, [5])
    line, before, found = judge("loss", step=6, loss=7.0, held_out="second")
    assert (line, before, list(found)) == (unknown.format("loss", "7.0000"), None, [6])


def test_no_right_answer_is_explained(tmp_path):
    recipe, run = pages.find("tiny", "full"), RunFolder(tmp_path)
    append_jsonl(run.evaluations, {"step": 0, "exact_match": 0.0, "cut_off": 0.5})
    evaluation = Evaluation(recipe, run, Datasets([], [{}] * 4, None, []), None, None, print)
    first, second = evaluation.warning(0.0).splitlines()
    assert first.startswith("warning: 0 of 4 answers match the expected text exactly; 2 of them were cut off at ")
    assert f"data.max_new_tokens={recipe.data.max_new_tokens}" in first and str(run.answers) in first
    assert "more steps" in second and "data.metric=loss" in second
    assert evaluation.warning(0.25) is None
    ranked = Evaluation(pages.find("tiny", "reward"), run, evaluation.datasets, None, None, print)
    assert ranked.warning(0.0) is None


@pytest.mark.parametrize(
    ("variant", "metric", "worse", "better", "what"),
    [
        ("full", "loss", 13.27, 8.3, "example"),
        ("pretrain", "loss", 13.27, 8.3, "sequence"),  # long texts are cut into several
        ("dpo_lora", "preference_accuracy", 0.5, 0.75, "example"),
    ],
)
def test_a_best_step_that_is_worse_than_no_training_is_named(tmp_path, variant, metric, worse, better, what):
    run, recipe = RunFolder(tmp_path), pages.find("tiny", variant)
    recipe = replace(recipe, data=replace(recipe.data, metric="loss"))
    append_jsonl(run.evaluations, {"step": 0, metric: better})
    kept, last = (
        Evaluation(replace(recipe, keep_best=keep), run, Datasets([], [{}], None, []), None, None, print)
        for keep in (True, False)
    )
    start = "warning: the model before training is better than the best step, which is exported: "
    assert kept.warning(worse).startswith(f"{start}{method.title(metric)} {method.shown(metric, better)}, then ")
    assert kept.warning(better) is None and last.warning(worse) is None
    assert kept.last_line(worse).startswith(f"{method.title(metric)} on 1 held-out {what}: ")


@pytest.mark.parametrize(
    ("variant", "metric", "ties", "steps"),
    [
        ("full", "exact_match", "loss", {2: (0.0, 13.29), 4: (0.0, 7.77), 6: (0.0, 6.87)}),
        ("full", "exact_match", "loss", {2: (0.0, 1.0), 4: (0.5, 7.77), 6: (0.5, 6.87), 8: (0.5, math.nan)}),
        ("full", "mine.py:F", "loss", {2: (7.0, 1.0), 4: (7.0, 2.0), 6: (7.0, 0.9)}),
        ("classify", "accuracy", "loss", {4: (0.5, 2.0), 6: (0.5, 1.5)}),
        ("dpo_lora", "preference_accuracy", "preference_margin", {4: (0.5, 1.5), 6: (0.5, 2.0)}),
        ("dpo_lora", "preference_accuracy", "preference_margin", {6: (0.5, 1.5), 8: (0.5, 1.5), 9: (0.25, 9.0)}),
        ("grpo", "exact_match", "reward", {4: (0.5, 0.1), 6: (0.5, 0.9)}),
    ],
)
def test_the_loss_or_the_margin_decides_between_equal_metrics(alone, tmp_path, variant, metric, ties, steps):
    (tmp_path / "mine.py").write_text("def F(answers, references):\n    return 0.0\n")
    run, recipe = RunFolder(tmp_path), pages.find("tiny", variant)
    if metric in ("exact_match", "mine.py:F"):
        recipe = replace(recipe, data=replace(recipe.data, metric=metric.replace("mine", f"{tmp_path}/mine")))
    recipe, metric = replace(recipe, keep_best=True, early_stopping=1), metric.rpartition(":")[2]
    first = steps[min(steps)]
    better = math.nextafter(first[1], 0.0 if ties == "loss" else 99.0)  # the untrained model, at the same metric
    append_jsonl(run.evaluations, {"step": 0, metric: first[0], ties: better})
    evaluation = Evaluation(recipe, run, Datasets([], [{}], None, []), None, None, print)
    append_jsonl(run.evaluations, {"step": min(steps), metric: first[0], ties: first[1]})
    title = method.title(ties)
    assert f"{title} {method.shown(ties, better)}, then " in evaluation.warning(first[0])
    for step in list(steps)[1:]:
        append_jsonl(run.evaluations, dict(zip(("step", metric, ties), (step, *steps[step]), strict=True)))
    found = judgements(run, recipe)
    assert best_step(recipe, found) == 6
    assert found == judgements(RunFolder(tmp_path), recipe), "read again by a resumed run"
    append_jsonl(run.evaluations, dict(zip(("step", metric, ties), (9, *steps[max(steps)]), strict=True)))
    evaluation.decide(9)
    assert evaluation.ended.startswith(f"no better {method.title(metric)} (ties: by {title}) than that of step 6, ")


def test_a_classifier_is_judged_by_accuracy_and_macro_f1(tmp_path):
    run = RunFolder(tmp_path)
    for step, accuracy, macro in ((0, 0.25, 0.1), (8, 1.0, 0.875)):
        append_jsonl(run.evaluations, {"step": step, "accuracy": accuracy, "macro_f1": macro, "loss": 1.0})
    evaluation = Evaluation(pages.find("tiny", "classify"), run, Datasets([], [{}] * 4, None, []), None, None, print)
    assert evaluation.last_line(1.0) == "accuracy on 4 held-out examples: 25.0% -> 100.0%, macro f1 10.0% -> 87.5%"


def test_a_resumed_run_says_where_it_is_and_that_its_schedule_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("deepspeed_recipes.training.distributed.is_first", lambda: True)
    recipe, size = replace(pages.find("tiny", "full"), epochs=1.0, global_batch_size=8), updates.Size(480, 480, 480, 99)
    training_run.say_updates(recipe, size, 2, None)
    new = capsys.readouterr().out
    checkpoint = tmp_path / "checkpoint-20"
    write_json(checkpoint / "trainer_state.json", {"max_steps": 60})
    training_run.say_updates(recipe, size, 2, checkpoint)
    assert capsys.readouterr().out == f"{new}resuming from step 21 of 60\n"
    training_run.say_updates(replace(recipe, epochs=2.0), size, 2, checkpoint)
    *_, resumed, changed = capsys.readouterr().out.splitlines()
    assert resumed == "resuming from step 21 of 120"
    assert changed == "the run had 60 steps: from here on the learning rate follows the cosine schedule of 120"


SOURCES = {
    "accelerate.accelerator": "accelerate/accelerator.py",
    "transformers.trainer_utils": "transformers/trainer_utils.py",
}
"""Where each logger's messages are written; DeepSpeed has one logger for all of its files."""


class Kept(logging.Handler):
    """Keeps messages; pytest's own handler has whatever level a library has given to all handlers of the root."""

    def __init__(self):
        super().__init__()
        self.messages = set()

    def emit(self, record):
        self.messages.add(record.getMessage())


def test_messages_that_nobody_can_act_on_are_left_out_and_others_are_not():
    kept = Kept()
    loggers = [logging.getLogger(name) for name in console.NOISE]
    before = [list(logger.filters) for logger in loggers]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        console.leave_out_noise()
        for text in chain.from_iterable(console.WARNINGS.values()):
            warnings.warn(f"{text}, set to True", stacklevel=1)
        warnings.warn("the disk is full", stacklevel=1)
    assert [str(one.message) for one in warned] == ["the disk is full"]
    try:
        for logger in loggers:
            logger.addHandler(kept)
            for text in console.NOISE[logger.name]:
                logger.warning("[RANK 0] %s and more", text)
                logger.warning("[Rank 12] %s and more", text)
                logger.warning("%s and more", text)
            logger.warning("the loss is not finite")
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.removeHandler(kept)
            logger.filters[:] = filters
    assert kept.messages == {"the loss is not finite"}


def test_what_is_left_out_is_still_what_the_libraries_say():
    """A message that a library has dropped or reworded can leave `console.NOISE` or `console.WARNINGS`."""
    for name, beginnings in (console.NOISE | console.WARNINGS).items():
        package = {"DeepSpeed": "deepspeed"}.get(name, name.partition(".")[0])
        folder = Path(str(importlib.util.find_spec(package).origin)).parent
        files = [folder.parent / SOURCES[name]] if name in SOURCES else list(folder.rglob("*.py"))
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        assert all(beginning in text for beginning in beginnings), (name, beginnings)
