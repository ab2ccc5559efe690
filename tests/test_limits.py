"""Which layouts can run: an accepted one gives every rank a position, and a refusal suggests one that is accepted."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import preflight
from deepspeed_recipes.recipe import compatibility, deepspeed_file, limits, overrides, pages
from deepspeed_recipes.recipe.deepspeed_file import DeepSpeedFile
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import bubble, data_parallel_size, rank_position
from deepspeed_recipes.recipe.methods import METHODS, Distill, Grpo
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.recipe import changed as changed_recipe
from tests import ROOT
from tests.tiers import examples


def zero(stage, partition_size=1):
    """Return the DeepSpeed file of a ZeRO stage."""
    return DeepSpeedFile(stage=stage, partition_size=partition_size)


SIZES = st.integers(1, 8)
LAYOUTS = st.builds(Layout, tensor=SIZES, pipeline=SIZES, sequence=SIZES, expert=SIZES)
FILES = st.builds(DeepSpeedFile, stage=st.integers(0, 3), partition_size=st.sampled_from([1, 2]))
MODELS = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "qwen3_5_text", "mixtral", "gpt_oss"]),
        "num_attention_heads": st.sampled_from([1, 6, 8, 12]),
    },
    optional={
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "num_hidden_layers": st.sampled_from([1, 3, 8]),
        "num_local_experts": st.sampled_from([2, 6, 8]),
    },
)


def recipe_of(layout=None, config=None, **changes):
    recipe = pages.find("tiny", "full")
    model = replace(recipe.model, config=recipe.model.config if config is None else config)
    return replace(recipe, layout=layout or Layout(), model=model, **changes)


@st.composite
def runs(draw):
    own = {"distill": TAUGHT, "grpo": Grpo(group_size=2, max_new_tokens=64)}
    method = draw(st.sampled_from([own.get(name, kind()) for name, kind in METHODS.items()]))
    lora = draw(st.sampled_from([None, Lora()]))
    micro = draw(st.sampled_from([1, 2]))
    recipe = recipe_of(draw(LAYOUTS), draw(MODELS), method=method, lora=lora, reward="rewards.py:right")
    least = 2 * micro if method.rollouts else micro  # of which a group has two answers
    recipe = replace(recipe, micro_batch_size=micro, global_batch_size=least * draw(st.integers(1, 64)))
    return recipe, draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])), draw(FILES)


def changed(run, suggestion):
    """Return the run with one suggestion applied, as the message words it."""
    recipe, world_size, file = run
    if suggestion.startswith("--gpus"):
        words = suggestion.split()
        return recipe, int(words[1]) * (int(words[3]) if "--nodes" in words else 1), file
    if suggestion == "deepspeed=pipeline.json":
        return recipe, world_size, deepspeed_file.read(ROOT / "configs" / "pipeline.json")
    return overrides.apply(recipe, suggestion.split()), world_size, file


def test_reasons_name_the_models_that_a_method_has():
    assert "one loss of all tokens" in METHODS["simpo"].excludes["pipeline"]
    assert "two models at once" in METHODS["dpo"].excludes["pipeline"]


def test_super_offload_is_read_where_deepspeed_reads_it():
    for stage, value, found in ((3, True, True), (3, False, False), (3, None, False), (2, True, False)):
        block = {"device": "cpu"} | ({} if value is None else {"super_offload": value})
        content = {"zero_optimization": {"stage": stage, "offload_optimizer": block}}
        assert deepspeed_file.parse(content).super_offload == found


@settings(max_examples=examples(300), deadline=None)
@given(runs())
def test_an_accepted_layout_gives_every_rank_a_position(run):
    recipe, world_size, _ = run
    if limits.limit(*run) is not None:
        return
    layout, data = recipe.layout, data_parallel_size(recipe.layout, world_size)
    positions = {rank_position(layout, rank, world_size) for rank in range(world_size)}
    assert len(positions) == world_size == layout.pipeline * data * layout.sequence * layout.tensor
    sizes = (layout.pipeline, data, layout.sequence, layout.tensor)
    assert all(
        0 <= number < size
        for one in positions
        for number, size in zip((one.stage, one.data, one.sequence, one.tensor), sizes, strict=True)
    )
    assert sum(one.is_first_reader for one in positions) == data


@settings(max_examples=examples(300), deadline=None)
@given(runs())
def test_a_refusal_suggests_what_is_accepted(run):
    recipe, world_size, file = run
    try:
        limits.check(recipe, world_size, file)
    except UserError as error:
        message = str(error)
    else:
        return
    assert message.count("\n") == 0 and message.endswith(".")
    if message.startswith("global_batch_size"):
        for number in re.search(r"are: (.*)\.", message)[1].split(", "):
            limits.check(overrides.apply(recipe, [f"global_batch_size={number}"]), world_size, file)
        return
    suggestions = message.rpartition("; use ")[2].removesuffix(".").split(" or ")
    assert suggestions[0].startswith("layout.")
    for suggestion in suggestions:
        assert limits.limit(*changed(run, suggestion)) is None, (message, suggestion)


def test_a_file_and_a_layout_that_disagree_are_told_what_runs():
    """A block of the file goes with its key of the layout, or not at all where the recipe cannot have that key."""
    tensor, expert = (deepspeed_file.read(ROOT / "configs" / f"{name}_parallel.json") for name in ("tensor", "expert"))
    llama, mixture = pages.find("llama3-8b", "lora"), pages.find("mixtral-8x7b", "full")
    quantised = pages.find("llama3-8b", "qlora")
    for recipe, file, said in (
        (llama, tensor, "splits layers over 2 ranks; add layout.tensor=2."),
        (quantised, tensor, "packed 4-bit weights cannot be split by rows or columns; use deepspeed=zero1.json."),
        (mixture, tensor, "its experts, which hold most of its weights, are not split; use deepspeed=zero1.json."),
        (mixture, expert, "splits experts over 2 ranks; add layout.expert=2."),
        (llama, expert, "llama has no experts; use deepspeed=zero1.json."),
        (replace(mixture, layout=Layout(expert=2)), zero(1), "use deepspeed=expert_parallel.json."),
    ):
        with pytest.raises(UserError) as refused:
            limits.check_blocks(recipe, file)
        assert str(refused.value).endswith(said)
    with pytest.raises(UserError, match=r"layout\.tensor=1 .*deepspeed=zero1\.json or --gpus 2 or --gpus 4\.$"):
        limits.check(replace(llama, layout=Layout(tensor=2)), 3, tensor)


@settings(max_examples=examples(100), deadline=None)
@given(runs())
def test_no_nearer_layout_is_possible(run):
    """Halving or doubling one size is one doubling away: where that is enough, nothing farther is offered."""
    recipe, world_size, file = run
    if limits.limit(*run) is None or recipe.layout == Layout():
        return
    old = (recipe.layout.tensor, recipe.layout.pipeline, recipe.layout.sequence, recipe.layout.expert)
    halves = [Layout(*(n // 2 if i == j else n for j, n in enumerate(old))) for i in range(4) if old[i] % 2 == 0]
    if any(limits.limit(replace(recipe, layout=layout), world_size, file) is None for layout in halves):
        found = limits.nearest(recipe, world_size, file)
        new = (found.tensor, found.pipeline, found.sequence, found.expert)
        factors = [max(a / b, b / a) for a, b in zip(old, new, strict=True)]
        product = factors[0] * factors[1] * factors[2] * factors[3]
        assert product <= 2


QWEN3 = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28}
MIXTRAL = {"model_type": "mixtral", "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
NF4 = {"model": replace(pages.find("tiny", "full").model, config=QWEN3, quantization="nf4"), "lora": Lora()}
TAUGHT = Distill(teacher="teacher")
FEEDBACK = {
    f"{method} {how}": (
        Layout(**{kind: 2}),
        QWEN3,
        {"method": method},
        2,
        zero(stage),
        f"({title}).*; use layout.{kind}=1",
    )
    for method, title in (
        *(("dpo", "DPO"), ("reward", "reward"), ("kto", "KTO"), ("orpo", "ORPO"), ("simpo", "SimPO")),
        *(("classify", "class|classifier|classifier's"), ("embed", "embedding|without a head")),
    )
    for how, kind, stage in (("and tensor", "tensor", 1), ("by parts", "sequence", 3), ("by stages", "pipeline", 1))
}
REFUSED = {
    "world": (
        Layout(tensor=4),
        QWEN3,
        {},
        6,
        zero(1),
        "6 ranks are not divisible by 4 .*tensor=2 or --gpus 4 or --gpus 8",
    ),
    "heads": (
        Layout(tensor=32),
        QWEN3,
        {},
        32,
        zero(1),
        "16 attention heads are not divisible by 32; use layout.tensor=8",
    ),
    "key/value heads": (
        Layout(tensor=16),
        QWEN3,
        {},
        16,
        zero(1),
        "8 key/value heads are not divisible by 16; use layout.tensor=8",
    ),
    "tensor and dora": (Layout(tensor=2), QWEN3, {"lora": Lora(dora=True)}, 2, zero(1), "DoRA .*=1"),
    "tensor and distillation": (
        Layout(tensor=2),
        QWEN3,
        {"method": TAUGHT},
        2,
        zero(1),
        "and distillation has two; use layout.tensor=1",
    ),
    "distillation by parts": (
        Layout(sequence=2),
        QWEN3,
        {"method": TAUGHT},
        2,
        zero(3),
        "distillation does not spread .*; use layout.sequence=1",
    ),
    "distillation by stages": (
        Layout(pipeline=2),
        QWEN3,
        {"method": TAUGHT},
        2,
        zero(1),
        "distillation needs the outputs of two models .*; use layout.pipeline=1",
    ),
    "tensor and dpo": (Layout(tensor=2), QWEN3, {"method": "dpo"}, 2, zero(1), "not with DPO's; use layout.tensor=1"),
    "tensor and 4-bit": (Layout(tensor=2), QWEN3, NF4, 2, zero(1), "4-bit .*; use layout.tensor=1"),
    "sequence heads": (
        Layout(sequence=32),
        QWEN3,
        {},
        32,
        zero(3),
        "16 attention heads are not divisible by 32; use layout.sequence=16",
    ),
    "both share heads": (
        Layout(tensor=8, sequence=4),
        QWEN3,
        {},
        32,
        zero(1),
        r"16 attention .* by 32 \(sequence x tensor\)",
    ),
    "reward and experts": (Layout(expert=2), MIXTRAL, {"method": "reward"}, 2, zero(1), "a reward model's head"),
    "kto and experts": (Layout(expert=2), MIXTRAL, {"method": "kto"}, 2, zero(1), "KTO has two"),
    **FEEDBACK,
    "linear attention": (
        Layout(sequence=2),
        {"model_type": "qwen3_5_text"},
        {},
        2,
        zero(3),
        "sequence parallelism does not support qwen3_5_text",
    ),
    "layers": (Layout(pipeline=32), QWEN3, {}, 32, zero(1), "at least one layer, .* 28; use layout.pipeline=16"),
    "stage": (
        Layout(pipeline=2),
        QWEN3,
        {},
        2,
        zero(3),
        "0 and 1 only; use layout.pipeline=1 or deepspeed=pipeline.json",
    ),
    "stages of 4 bits": (Layout(pipeline=2), QWEN3, NF4, 2, zero(1), "4-bit .*; use layout.pipeline=1"),
    "dense": (Layout(expert=2), QWEN3, {}, 2, zero(1), "qwen3 has no experts; use layout.expert=1"),
    "experts": (
        Layout(expert=16),
        MIXTRAL,
        {},
        16,
        zero(1),
        "8 experts are not divisible by 16; use layout.expert=8",
    ),
    "data ranks": (
        Layout(expert=4),
        MIXTRAL,
        {},
        6,
        zero(1),
        "6 data-parallel ranks are not divisible by 4 .*expert=2 or --gpus 4 or --gpus 8",
    ),
    "expert and tensor": (
        Layout(tensor=2, expert=2),
        MIXTRAL,
        {},
        4,
        zero(1),
        "cannot be combined with tensor, pipeline or sequence",
    ),
    "expert and stages": (
        Layout(pipeline=2, expert=2),
        MIXTRAL,
        {},
        4,
        zero(1),
        "cannot be combined with tensor, pipeline or sequence",
    ),
    "expert and parts": (
        Layout(sequence=2, expert=2),
        MIXTRAL,
        {},
        4,
        zero(1),
        "cannot be combined with tensor, pipeline or sequence",
    ),
    "expert and lora": (Layout(expert=2), MIXTRAL, {"lora": Lora()}, 2, zero(1), "together with their adapters"),
    "expert and dpo": (Layout(expert=2), MIXTRAL, {"method": "dpo"}, 2, zero(1), "DPO has two"),
    "expert and no ZeRO": (Layout(expert=2), MIXTRAL, {}, 2, zero(0), "wrong gradient norm"),
    "hpZ": (
        Layout(sequence=2),
        QWEN3,
        {},
        4,
        zero(3, partition_size=2),
        "zero_hpz_partition_size=2 works with data",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_has_its_message(case):
    layout, config, changes, world_size, file, expected = REFUSED[case]
    recipe = replace(recipe_of(layout, config), global_batch_size=192, micro_batch_size=1, **changes)
    with pytest.raises(UserError, match=expected):
        limits.check(recipe, world_size, file)


def test_unknown_dimensions_are_not_checked():
    assert limits.limit(recipe_of(Layout(tensor=4, pipeline=2, sequence=2), {}), 16, zero(1)) is None


def test_every_family_reason_is_of_a_technique_and_of_a_real_architecture():
    from transformers import CONFIG_MAPPING

    assert set(compatibility.FAMILIES) == {"tensor", "pipeline", "sequence", "expert"}
    assert all(kind in CONFIG_MAPPING for reasons in compatibility.FAMILIES.values() for kind in reasons)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zero0", zero(0)),
        ("zero2_offload", zero(2)),
        ("zero3_nvme", zero(3)),
        ("zero3_hpz", zero(3, partition_size=2)),
        ("pipeline", zero(1)),
    ],
)
def test_the_stage_is_read_from_the_file(name, expected):
    file = deepspeed_file.read(ROOT / "configs" / f"{name}.json")
    assert (file.stage, file.partition_size) == (expected.stage, expected.partition_size)


def test_the_old_spelling_of_a_stage_is_understood():
    assert [deepspeed_file.parse({"zero_optimization": on}).stage for on in (False, True)] == [0, 1]


@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        ({"stage": 2, "cpu_offload": True}, ("cpu", "none")),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, ("cpu", "cpu")),
        ({"stage": 3, "cpu_offload": False, "offload_param": {"device": "nvme"}}, ("none", "nvme")),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, ("cpu", "none")),
        ({"stage": 0, "cpu_offload": True}, ("none", "none")),
        ({"stage": "auto", "cpu_offload": True, "cpu_offload_param": True}, ("cpu", "none")),
    ],
)
def test_offloading_is_what_deepspeed_reads(zero, devices):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    file = deepspeed_file.parse({"zero_optimization": zero})
    assert (file.offload_optimizer, file.offload_parameters) == devices
    theirs = DeepSpeedZeroConfig(**zero | {"stage": file.stage})  # accelerate replaces "auto"
    read = [str(block.device) if block else "none" for block in (theirs.offload_optimizer, theirs.offload_param)]
    used = [device if file.stage >= least else "none" for device, least in zip(read, (1, 3), strict=True)]
    assert tuple(used) == devices


def test_old_names_in_a_deepspeed_file_are_read_or_refused():
    old = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": False}
    assert not deepspeed_file.parse({"zero_optimization": old}).gathers_weights
    assert deepspeed_file.parse({"zero_optimization": {"stage": 3}}).gathers_weights
    file = deepspeed_file.parse({"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert "bfloat16 is the old name of bf16" in limits.limit(pages.find("tiny", "full"), 2, file)


def test_a_pipeline_bubble_is_reported(capsys, printed_by):
    assert bubble(1, 8) == 0 and bubble(4, 1) == 0.75 and bubble(2, 8) == pytest.approx(1 / 9)
    command = ["tiny", "full", "deepspeed=pipeline.json", "layout.pipeline=2", "--gpus", "2", "--dry-run"]
    assert launch.main([*command, "global_batch_size=4", "micro_batch_size=1"]) == 0
    assert "stages idle 20% of the time; with 8" in capsys.readouterr().out
    assert "stages idle" not in printed_by("launch", *command, "global_batch_size=8", "micro_batch_size=1")


@pytest.mark.parametrize("each, spans", [(2, True), (3, True), (4, False), (8, False)])
def test_tensor_parallelism_across_nodes_is_reported(each, spans, capsys):
    recipe = replace(pages.find("tiny", "full"), layout=Layout(tensor=4), deepspeed="zero1.json", global_batch_size=24)
    preflight.check_layout(recipe, DeepSpeedFile(stage=1), 8 if each != 3 else 12, each)
    assert ("layout.tensor=4: groups span nodes" in capsys.readouterr().out) == spans


@pytest.mark.parametrize("targets", ["q_proj,lm_head", "embed_tokens", "model.embed_tokens"])
def test_adapters_on_the_embedding_or_the_head_are_refused_in_a_pipeline(targets):
    recipe = replace(pages.find("qwen3-0.6b", "lora"), layout=Layout(pipeline=2))
    assert limits.limit(recipe, 2, DeepSpeedFile(stage=1)) is None
    outside = replace(recipe, lora=replace(recipe.lora, target_modules=targets))
    assert targets.split(",")[-1] in limits.limit(outside, 2, DeepSpeedFile(stage=1))
    assert limits.limit(replace(outside, layout=Layout()), 2, DeepSpeedFile(stage=1)) is None


def test_the_launcher_checks_the_model_that_will_be_trained(model_folder, refusal):
    command = ["tiny", "full", "deepspeed=zero1.json", "--gpus", "8", "--dry-run", "layout.tensor=4"]
    assert launch.main(command) == 0  # of 4 key/value heads on the page
    error = refusal("launch", *command, f"model.path={model_folder}")
    assert "2 key/value heads are not divisible by 4; use layout.tensor=2" in error
    assert "2 key/value heads are not divisible by 4; use layout.tensor=2" in refusal("launch", *command, "--draft")


@pytest.mark.parametrize("family", ["tiny_vision", "gemma3_vision-4b", "qwen2_5_vl-3b"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_layouts_that_a_recipe_itself_refuses_are_not_suggested(family, ranks):
    """Models with a vision tower refuse every layout but data parallelism when the recipe is made."""
    recipe = replace(pages.find(family, "full"), global_batch_size=24, micro_batch_size=1)
    assert changed_recipe(recipe, layout=Layout(sequence=2)) is None
    assert limits.nearest(recipe, ranks, zero(3)) == Layout()
    with pytest.raises(UserError) as refused:
        limits.check(replace(recipe, optimizer="muon"), ranks, DeepSpeedFile(stage=3, offload_optimizer="cpu"))
    assert "vision" not in str(refused.value)


def test_numbers_of_gpus_that_do_not_divide_the_batch_are_not_suggested():
    recipe = replace(pages.find("llama3-8b", "full"), global_batch_size=16, micro_batch_size=1)
    recipe = replace(recipe, layout=Layout(tensor=2))
    assert limits.suggestions(recipe, 7, zero(1))[1:] == ["--gpus 8"], "6 GPUs are three copies"


def test_answers_of_a_micro_batch_that_are_compared_are_several():
    recipe = replace(pages.find("tiny", "kto_lora"), micro_batch_size=1)
    with pytest.raises(UserError, match="KTO compares the answers of a micro-batch; use micro_batch_size=2 or more"):
        limits.check_micro_batch(recipe)
    limits.check_micro_batch(replace(recipe, micro_batch_size=2))


FIXED = {
    '{"train_micro_batch_size_per_gpu": 2}': "micro_batch_size=2",
    '{"train_batch_size": 64}': "global_batch_size=64",
    '{"gradient_accumulation_steps": 9}': "global_batch_size=72",
    '{"gradient_clipping": 0.3}': "max_grad_norm=0.3",
    '{"bf16": {"enabled": true}}': "precision=bf16",
    '{"bf16": {"enabled": false}, "fp16": {"enabled": true}}': "precision=fp16",
    '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-06}}}': "learning_rate=1e-06",
    '{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.5]}}}': "adam_beta2=0.5",
    '{"optimizer": {"type": "AdamW", "params": {"eps": 0.1}}}': "adam_epsilon=0.1",
    '{"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.5}}}': "weight_decay=0.5",
}


@pytest.mark.parametrize("fixed", FIXED)
def test_a_file_that_contradicts_the_recipe_is_refused_with_the_overrides_that_agree(tmp_path, fixed):
    file, recipe = tmp_path / "mine.json", pages.find("tiny", "full")
    file.write_text(json.dumps(json.loads((CONFIGS / "zero2.json").read_text()) | json.loads(fixed)))
    recipe = replace(recipe, deepspeed=str(file), precision="bf16" if "fp16" in fixed else "fp32")
    with pytest.raises(UserError, match="the recipe has") as refused:
        preflight.check_config(recipe, 2, 2)
    _, said = str(refused.value).splitlines()
    assert said.endswith(f", or add {FIXED[fixed]}"), said
    preflight.check_config(overrides.apply(recipe, [FIXED[fixed]]), 2, 2)


LACKING = {
    '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}': [
        "optimizer.params.betas: DeepSpeed's default of 0.999 replaces adam_beta2=0.95",
        "optimizer.params.eps: DeepSpeed's default of 1e-08 replaces adam_epsilon=1e-05",
        "optimizer.params.weight_decay: DeepSpeed's default of 0.0 replaces weight_decay=0.1",
    ],
    '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}': [
        "scheduler.params.warmup_num_steps: DeepSpeed's default of 1000 steps counts, whatever warmup_steps is",
        "scheduler.params.warmup_max_lr: DeepSpeed's default of 0.001 counts, whatever learning_rate is",
    ],
    json.dumps({"optimizer": json.loads((CONFIGS / "zenflow.json").read_text())["optimizer"]}): [],
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}': [],
}


@pytest.mark.parametrize("block", LACKING)
def test_settings_that_a_block_of_the_file_replaces_by_deepspeeds_defaults_are_named(tmp_path, capsys, block):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(json.loads((CONFIGS / "zero2.json").read_text()) | json.loads(block)))
    changes = {"adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.1}
    preflight.check_config(replace(pages.find("tiny", "full"), deepspeed=str(file), **changes), 2, 2)
    said = [line for line in capsys.readouterr().out.splitlines() if ".params." in line]
    assert [line.partition("warning: ")[2].rpartition(" [")[0] for line in said] == LACKING[block]


def test_a_dry_run_finds_a_long_warm_up_and_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["tiny", "full", "--gpus", "2", "--dry-run"]
    assert launch.main([*words, "schedule.warmup=200", "max_steps=100"]) == 0
    assert "schedule.warmup=200: the learning rate rises for 200 updates and the run has 100" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--output-dir .*file/run: cannot be written"):
        launch.main([*words, "--output-dir", str(tmp_path / "file" / "run")])


UNREAD = {
    "full max_steps=3 epochs=2": ["epochs"],
    "full max_steps=3 save_steps=0 keep_checkpoints=3": ["keep_checkpoints"],
    "full data.validation=none eval_steps=10 data.sample_answers=3": ["data.sample_answers", "eval_steps"],
    "full data.validation=none eval_steps=none data.sample_answers=0": [],
    "full data.validation=a.jsonl data.validation_share=0.2": ["data.validation_share"],
    "full data.metric=loss data.sample_answers=3 eval_steps=5 eval_examples=8": ["eval_examples"],
    "full data.sample_answers=0 eval_steps=5 eval_examples=8": ["data.sample_answers"],
    "full data.streaming=true data.workers=4 max_steps=5": ["data.workers"],
    "full tracking=none wandb.project=x wandb.name=y wandb.mode=disabled": ["wandb.name", "wandb.project"],
    "full tracking=tensorboard wandb.project=x wandb.artifacts=true": ["wandb.artifacts", "wandb.project"],
    "full tracking=trackio wandb.project=x wandb.group=x wandb.name=x": ["wandb.name"],
    "full schedule.kind=constant schedule.warmup=9": ["schedule.warmup"],
    "full draft.layers=3 profile.ranks=all data.max_pixels=9999": ["data.max_pixels", "draft.layers", "profile.ranks"],
    "dpo_lora packing=true lora.dropout=0.1 eval_steps=5 eval_examples=8": ["eval_examples", "lora.dropout", "packing"],
    "kto_lora lora.dropout=0.1": ["lora.dropout"],
    "lora lora.dropout=0.1": [],
    "pretrain model.chat_template=chatml": ["model.chat_template"],
    "pretrain data.max_new_tokens=9 data.roles=a:user data.join_turns=true": [
        *("data.join_turns", "data.max_new_tokens", "data.roles")
    ],
    "dpo_lora data.max_new_tokens=9 data.roles=a:user": ["data.max_new_tokens"],
    "embed data.roles=a:user": ["data.roles"],
    "full data.metric=loss data.max_new_tokens=9 data.sample_answers=2 data.roles=a:user": [],
    "distill distill.beta=0.3 distill.max_new_tokens=9": ["distill.beta", "distill.max_new_tokens"],
    "distill distill.on_policy=0.5 distill.max_new_tokens=99 packing=false data.max_new_tokens=9": [],
    "grpo data.max_new_tokens=9 eval_steps=5 eval_examples=8": ["data.max_new_tokens", "eval_examples"],
    "grpo grpo.loss=rloo grpo.epsilon_high=0.3 grpo.scale=batch": ["grpo.epsilon_high", "grpo.scale"],
}


@pytest.mark.parametrize("words", UNREAD)
def test_settings_that_another_leaves_without_effect_are_named(words):
    variant, *given = words.split()
    case = compatibility.Case(overrides.apply(pages.find("tiny", variant), given))
    found = list(compatibility.unread(case, overrides.keys_of(given)))
    assert sorted(line.partition("=")[0] for line in found) == UNREAD[words]
    assert all(" is not read: " in line and "{" not in line for line in found)
    assert not list(compatibility.unread(case, [])), "a page's own settings are not named"


def test_every_unread_setting_is_a_key():
    rows = [row for row in compatibility.TABLE if row.moment == "unread"]
    assert len(rows) > 20 and not any(row.remedy for row in rows)
    assert {re.split("[!=<>]", row.setting)[0] for row in rows} <= overrides.override_keys().keys()


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_value_of_the_file_that_contradicts_the_recipe_is_offered_as_its_key(sequence, tmp_path):
    """But not a batch of all ranks, which DeepSpeed multiplies by the sequence ranks."""
    file = tmp_path / "fixed.json"
    for key, value, offered in (
        ("gradient_clipping", 0.3, "max_grad_norm=0.3"),
        ("train_batch_size", 12, "global_batch_size=12" if sequence == 1 else None),
    ):
        file.write_text(json.dumps(json.loads((CONFIGS / "zero3.json").read_text()) | {key: value}))
        words = [f"deepspeed={file}", f"layout.sequence={sequence}"]
        with pytest.raises(UserError, match=f"{key} = {value}: the recipe has") as error:
            preflight.check_config(overrides.apply(pages.find("tiny", "full"), words), 2, 2)
        assert str(error.value).endswith(f'write "auto" in the file, or add {offered}' if offered else "in the file")


def test_values_that_contradict_the_recipe_are_offered_at_once_and_the_linter_shows_the_other_errors(tmp_path):
    file = tmp_path / "fixed.json"
    own = {"gradient_clipping": 0.3, "train_batch_size": 16, "zero_optimization": {"stage": 5}}
    file.write_text(json.dumps(json.loads((CONFIGS / "zero1.json").read_text()) | own))
    recipe = overrides.apply(pages.find("tiny", "full"), [f"deepspeed={file}"])
    with pytest.raises(UserError) as error:
        preflight.check_config(recipe, 2, 2)
    changes = "max_grad_norm=0.3 global_batch_size=16"
    _, fix, more = str(error.value).splitlines()
    assert sorted(fix.partition("or add ")[2].split()) == sorted(changes.split())
    assert more == f"(1 more; ds-recipes check {file} --world-size 2 shows it)"
    with pytest.raises(UserError, match=r"zero_optimization\.stage = 5"):
        preflight.check_config(overrides.apply(recipe, changes.split()), 2, 2)
    file.write_text(file.read_text().replace("5}", "1,}"))
    with pytest.raises(UserError, match=r"not JSON .*\nds-recipes check .* --fix it repairs commas"):
        deepspeed_file.read(file)
