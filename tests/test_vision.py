"""Pictures in conversations: how they are written, read, checked and tokenized, and what the loss is on.

The sample that sees: drawings, questions and the model that starts out reading them.
"""

import base64
import io
import json
import random
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available
from trl.chat_template_utils import get_training_chat_template, qwen2_5_vl_chat_template, smolvlm_chat_template

from deepspeed_recipes.launching import preflight
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.search.strategies import evaluate, plan_request
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.recipe import Data
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_VISION
from deepspeed_recipes.training.data import images, tokenize
from deepspeed_recipes.training.data.image_conversations import PictureCollator
from deepspeed_recipes.training.model import load, processor
from deepspeed_recipes.training.parallel import expert
from scripts.maintain.samples.sight import ask, draw, labels, make_data
from tests import seeing
from tests.conftest import write_rows
from tests.versions import needs


def turns(asked, answer="yes"):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def part(**source):
    return {"type": "image", **source}


TEXT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with good pictures and bad ones."""
    made = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (40, 30), (200, 30, 30)).save(made / "a.png")
    Image.new("RGB", (20, 60), (30, 30, 200)).save(made / "b.jpg")
    Image.new("1", (30_000, 8)).save(made / "wide.png")
    Image.effect_noise((60, 60), 90).convert("RGB").save(made / "cut.jpg")
    whole = (made / "cut.jpg").read_bytes()
    (made / "cut.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (made / "text.png").write_text("no picture", encoding="utf-8")
    (made / "empty.png").write_bytes(b"")
    return made


def as_bytes(folder):
    return (folder / "a.png").read_bytes()


WRITTEN = {
    "parts with a path": lambda _: {"messages": turns([part(image="a.png"), TEXT])},
    "parts with a named path": lambda _: {"messages": turns([part(path="a.png"), TEXT])},
    "an absolute path": lambda f: {"messages": turns([part(image=str(f / "a.png")), TEXT])},
    "a file's URL": lambda f: {"messages": turns([part(url=f"file://{f / 'a.png'}"), TEXT])},
    "OpenAI's image_url": lambda f: {
        "messages": turns(
            [
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64," + base64.b64encode(as_bytes(f)).decode()},
                },
                TEXT,
            ]
        )
    },
    "bytes of a part": lambda f: {"messages": turns([part(bytes=as_bytes(f), path="gone.png"), TEXT])},
    "bytes": lambda f: {"messages": turns([part(image={"bytes": as_bytes(f), "path": None}), TEXT])},
    "a list beside placeholders in the text": lambda _: {"images": ["a.png"], "messages": turns("<image>What?")},
    "a list beside parts": lambda _: {"images": ["a.png"], "messages": turns([part(), TEXT])},
    "one image": lambda _: {"image": "a.png", "messages": turns("<image>What?")},
    "ShareGPT": lambda _: {
        "images": ["a.png"],
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "yes"}],
    },
    "prompt and completion": lambda _: {"images": ["a.png"], "prompt": "<image>What?", "completion": "yes"},
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_way_to_write_a_picture_means_the_same(folder, form):
    (found,) = images.converted([("data:1", WRITTEN[form](folder))], "sft", "auto", folder)
    assert found["messages"] == turns([{"type": "image"}, TEXT])
    assert len(found["images"]) == 1 and found["where"] == "data:1"
    assert images.read("x", found["images"][0], 10**6).size == (40, 30)


def test_pictures_keep_their_places():
    asked = [
        {"type": "text", "text": "First "},
        part(path="/a.png"),
        {"type": "text", "text": " then "},
        part(path="/b.jpg"),
    ]
    rows = [{"messages": [*turns(asked), *turns([part(path="/c.png"), TEXT])]}, {"messages": turns("no <image> here")}]
    first, second = images.converted(((f"data:{n}", row) for n, row in enumerate(rows)), "sft", "auto", None)
    assert [one["path"] for one in first["images"]] == ["/a.png", "/b.jpg", "/c.png"]
    assert [one["type"] for one in first["messages"][0]["content"]] == ["text", "image", "text", "image"]
    assert second["images"] == [] and second["messages"][0]["content"] == "no <image> here"
    answer = [{"role": "assistant", "content": [part(path="/z.png")]}]
    swapped = {"completion": answer, "prompt": [{"role": "user", "content": [part(path="/a.png"), TEXT]}]}
    plain, found = images.taken_out("data:3", swapped, None)
    assert [one["path"] for one in found] == ["/a.png", "/z.png"], (
        "in the order of the turns, whatever that of the keys"
    )
    assert list(plain) == ["completion", "prompt"]


BAD = {
    "missing": ({"messages": turns([part(image="none.png"), TEXT])}, "none.png): no such file"),
    "cut off": ({"messages": turns([part(image="cut.jpg"), TEXT])}, "cut.jpg): cut off or damaged"),
    "too wide": ({"messages": turns([part(image="wide.png"), TEXT])}, "30,000 x 8 pixels; at most 16,384"),
    "not an image": ({"messages": turns([part(image="text.png"), TEXT])}, "text.png): not an image"),
    "empty": ({"messages": turns([part(image="empty.png"), TEXT])}, "empty.png): not an image"),
    "bytes that are none": (
        {"messages": turns([{"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, TEXT])},
        "not an image that Pillow reads; save it",
    ),
    "not base64": ({"messages": turns([part(base64="!"), TEXT])}, "not base64"),
    "more pictures than places": (
        {"images": ["a.png", "b.jpg"], "messages": turns("<image>What?")},
        "2 images in 'images', but 1 place; write <image>",
    ),
    "fewer": ({"images": ["a.png"], "messages": turns("<image><image>What?")}, "1 image in 'images', but 2 places"),
    "a place and no list": ({"messages": turns([part(), TEXT])}, "0 images in 'images', but 1 place"),
    "a URL": ({"messages": turns([part(url="https://a.example/b.png"), TEXT])}, "is a URL (https://a.example/b.png)"),
    "a number": ({"messages": turns([part(image=3), TEXT])}, "of type int; give the path of a file"),
    "text of a picture": (
        {"messages": turns([{"type": "image", "image": "a.png", "text": "A dial."}, TEXT])},
        "parts that are not text (image)",
    ),
    "two lists": ({"images": ["a.png"], "image": "b.jpg", "messages": turns("<image>What?")}, "which mean the same"),
    "two of a part": ({"messages": turns([part(image="a.png", url="b.jpg"), TEXT])}, "a part has image and url, each"),
    "other parts": ({"messages": turns([{"type": "video", "video": "a.mp4"}, TEXT])}, "parts that are not text"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_the_launcher_names_file_line_and_fix(folder, mistake):
    row, said = BAD[mistake]
    good = {"messages": turns([part(image="a.png"), TEXT])}
    path = write_rows(folder / f"{mistake.replace(' ', '_')}.jsonl", [good, row])
    recipe = seeing.recipe_for(folder, path, "zero0.json")
    with pytest.raises(UserError) as refused:
        preflight.check_data(recipe)
    message = str(refused.value)
    assert message.startswith(f"{path}:2: ") and said in message and len(message.splitlines()) == 1


def test_a_recipe_that_reads_text_says_what_reads_pictures(folder):
    path = write_rows(folder / "text.jsonl", [{"messages": turns([part(image="a.png"), TEXT])}])
    recipe = replace(pages.find("tiny", "full"), data=Data(path=str(path)))
    with pytest.raises(UserError, match=r":1: turn 1 .* not text \(image\), which is all .* model\.vision=true"):
        preflight.check_data(recipe)


def test_a_picture_that_is_cut_off_is_found_before_training_in_parquet_too(folder, tmp_path, sample):
    image = {"bytes": (folder / "cut.jpg").read_bytes(), "path": None}
    data = Dataset.from_list([{"images": [image], "messages": turns("<image>What?")}])
    data = data.cast_column("images", [ImageFeature()])
    data.to_parquet(tmp_path / "data.parquet")
    recipe = seeing.recipe_for(sample("llava"), tmp_path / "data.parquet", "zero0.json")
    with pytest.raises(UserError, match=r"data\.parquet: row 1: image 1: cut off or damaged"):
        tokenize.prepare(recipe.data.path, recipe, AutoTokenizer.from_pretrained(recipe.model.path))


def test_pictures_are_made_smaller_in_proportion_and_turned_as_the_camera_says():
    image = Image.new("RGB", (400, 100))
    assert images.within(image, 10**6) is image
    smaller = images.within(image, 10_000)
    assert smaller.size == (200, 50)
    assert images.within(Image.new("RGB", (1000, 1)), 100).size == (316, 1)
    assert images.within(Image.new("RGB", (1, 1000)), 100).size == (1, 316)
    held = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.save(held, "JPEG", exif=exif)
    assert images.read("x", {"path": None, "bytes": held.getvalue()}, 10**6).size == (100, 400)
    clear = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(clear, "PNG")
    assert images.read("x", {"path": None, "bytes": clear.getvalue()}, 100).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("kind", "mode", "highest", "frames", "wrong"),
    [
        *((kind, mode, 200, 1, None) for kind, mode in (("PNG", "I;16"), ("PNG", "P"), ("JPEG", "CMYK"), ("PNG", "1"))),
        *((kind, "I;16", 300, 1, r"more than 8 bits per colour \(I;16\)") for kind in ("PNG", "TIFF")),
        ("TIFF", "F", 1, 1, r"more than 8 bits per colour \(F\)"),
        *((kind, "L", 200, 2, "2 frames or pages") for kind in ("GIF", "TIFF", "WEBP", "PNG")),
        ("MPO", "RGB", 200, 2, None),
    ],
)
def test_what_eight_bits_and_one_frame_cannot_hold_is_refused(kind, mode, highest, frames, wrong):
    held, pictures = io.BytesIO(), [Image.new(mode, (4, 4), highest - 100 * at) for at in range(frames)]
    pictures[0].save(held, kind, **({"save_all": True, "append_images": pictures[1:]} if frames > 1 else {}))
    picture = {"path": None, "bytes": held.getvalue()}
    for look in (images.check, partial(images.read, max_pixels=100)):
        if wrong:
            with pytest.raises(UserError, match=f"^a: image 1: has {wrong}.*; save .*or remove the example"):
                look("a: image 1", picture)
        else:
            look("a: image 1", picture)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return seeing.models(tmp_path_factory)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return seeing.write_conversations(tmp_path_factory.mktemp("shown"), [1, 2, 4, 5])


def prepared(model, path, **changes):
    """Return the recipe, the tokenizer and the sequences of a run."""
    recipe = seeing.recipe_for(model, path, "zero0.json", **changes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences, _ = tokenize.prepare(str(path), recipe, tokenizer)
    return recipe, tokenizer, sequences


@pytest.mark.parametrize("kind", seeing.KINDS)
@needs("transformers>=5.20")  # 5.17's mask misses the answer after two pictures
def test_tokens_mask_and_loss_are_those_of_transformers_with_the_processor(sample, shown, kind):
    recipe, tokenizer, sequences = prepared(sample(kind), shown)
    model = AutoModelForImageTextToText.from_pretrained(recipe.model.path, dtype=torch.float32).train()
    collator = PictureCollator.of(recipe, tokenizer, model)
    rows = [json.loads(line) for line in shown.read_text(encoding="utf-8").splitlines()]
    silent = set(collator.seen.image_token_ids)
    for sequence, row in zip(sequences, rows, strict=True):
        expected = seeing.plain_inputs(collator.seen, row, shown.parent)
        assert sequence["input_ids"] == expected["input_ids"][0].tolist()
        learned = [label != -100 for label in sequence["labels"]]
        assert learned == expected["learned"][0].tolist()
        assert not any(token in silent for token, one in zip(sequence["input_ids"], learned, strict=True) if one)
        answer = tokenizer.decode([label for label in sequence["labels"] if label != -100])
        assert answer.startswith(row["messages"][1]["content"])
        inputs = {name: one for name, one in collator([sequence]).items() if torch.is_tensor(one)}
        total, count = seeing.plain_loss(model, expected)
        assert model(**inputs).loss.item() == pytest.approx((total / count).item(), rel=1e-5)


@needs("transformers>=5.17")
def test_a_picture_of_qwens_has_positions_in_two_dimensions_beside_other_sequences(sample, shown):
    """In a padded batch, with sequences without pictures, as `get_rope_index` says for each alone."""
    recipe, tokenizer, sequences = prepared(sample("qwen2_5_vl"), shown)
    model = AutoModelForImageTextToText.from_pretrained(recipe.model.path, dtype=torch.float32)
    collator, passed = PictureCollator.of(recipe, tokenizer, model), []
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: passed.append(inputs["position_ids"]), with_kwargs=True
    )
    rows = [sequences[number] for number in (0, 1, 2)]
    assert [len(one["images"]) for one in rows] == [0, 1, 2]
    model(**{name: one for name, one in collator(rows).items() if torch.is_tensor(one)})
    for number, row in enumerate(rows):
        length, alone = len(row["input_ids"]), collator.alone(row)
        found = passed[0][:, number, :length]
        straight = torch.arange(length).expand(3, -1)
        if row["images"]:
            grids = {name: alone[name] for name in ("mm_token_type_ids", "image_grid_thw")}
            expected, _ = model.model.get_rope_index(torch.tensor([row["input_ids"]]), **grids)
            assert torch.equal(found, expected[:, 0]) and not torch.equal(found, straight)
            assert not torch.equal(found[1], found[2]), "rows and columns"
        else:
            assert torch.equal(found, straight)


@needs("transformers>=5.20")
def test_qwens_own_chat_template_marks_what_trls_version_marks(shown, tmp_path):
    tokens = {"image_token": "<|image_pad|>", "starts": "<|im_start|>", "ends": "<|im_end|>"}
    tokenizer = AutoTokenizer.from_pretrained(TINY_VISION, extra_special_tokens=tokens)
    tokenizer.chat_template = qwen2_5_vl_chat_template
    shape = {"size": {"shortest_edge": 28**2, "longest_edge": 84**2}}
    kind = processor.pictures_only(Qwen2_5_VLProcessor)
    kind(Qwen2VLImageProcessorPil(**shape), tokenizer, qwen2_5_vl_chat_template).save_pretrained(tmp_path)
    _, tokenizer, sequences = prepared(tmp_path, shown)
    plain = processor.load(str(tmp_path))
    plain.chat_template = get_training_chat_template(tokenizer)
    for sequence, line in zip(sequences, shown.read_text(encoding="utf-8").splitlines(), strict=True):
        expected = seeing.plain_inputs(plain, json.loads(line), shown.parent)
        # The sample's tokenizer begins with a token that Qwen's does not have.
        assert sequence["input_ids"] == expected["input_ids"][0, 1:].tolist()
        assert [label != -100 for label in sequence["labels"]] == expected["learned"][0, 1:].tolist()


VIDEOS = {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 3.0}


WRITTEN_IN = ["processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"]
"""What newer and older files hold the settings for videos in; the last has those for pictures too."""


@pytest.mark.parametrize("file", WRITTEN_IN)
def test_without_torchvision_the_settings_for_videos_are_kept(sample, tmp_path, monkeypatch, file):
    monkeypatch.setattr(processor, "is_torchvision_available", lambda: False)
    model, export = tmp_path / "model", tmp_path / "export"
    shutil.copytree(sample("qwen2_5_vl"), model)
    written = read_json(model / "processor_config.json")
    pictures = written.pop("image_processor")
    if file == "processor_config.json":
        write_json(model / file, written | {"image_processor": pictures, "video_processor": VIDEOS})
    else:
        (model / "processor_config.json").unlink()
        write_json(model / "preprocessor_config.json", {"processor_class": "Qwen2_5_VLProcessor", **pictures})
        if file == "video_preprocessor_config.json":
            write_json(model / file, VIDEOS)
    processor.load(str(model)).save_pretrained(export)
    saved, whole = read_json(export / "processor_config.json"), read_json(model / file)
    assert saved["video_processor"] == whole.get("video_processor", whole)
    assert saved["processor_class"] == "Qwen2_5_VLProcessor" and saved["image_processor"] == pictures


def test_with_torchvision_or_another_processor_nothing_is_left_out(sample, tmp_path, monkeypatch):
    """LLaVA-OneVision's has options that would be lost."""
    write_json(tmp_path / "processor_config.json", {"processor_class": "LlavaOnevisionProcessor"})
    assert processor.load_without_videos(str(tmp_path)) is processor.load_without_videos(str(sample("gemma3"))) is None
    monkeypatch.setattr(processor, "is_torchvision_available", lambda: True)
    assert processor.load_without_videos(str(sample("qwen2_5_vl"))) is None


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_transformers_asks_for_torchvision_to_see_pictures(sample):
    """If this fails, `load_without_videos` in processor.py can go."""
    with pytest.raises((ImportError, ValueError), match="Torchvision library"):
        AutoProcessor.from_pretrained(sample("qwen2_5_vl"))


@needs("transformers>=5.20")  # older ones cannot mark control tokens
def test_a_typed_picture_token_is_text(sample, tmp_path):
    path = write_rows(tmp_path / "typed.jsonl", [{"messages": turns("<|image|> is a word", "so is <|image|>")}])
    _, tokenizer, sequences = prepared(sample("llava"), path)
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    assert image not in sequences[0]["input_ids"] and "<|image|> is a word" in tokenizer.decode(
        sequences[0]["input_ids"]
    )


@needs("transformers>=5.17")
def test_a_template_that_shows_only_parts_gets_parts(sample, shown, tmp_path):
    """SmolVLM's: of a string it would show nothing, neither an answer nor a question without an image."""
    model = shutil.copytree(sample("idefics3"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<end_of_utterance>"]}, replace_extra_special_tokens=False
    )
    image = processor.load(str(model)).image_token
    tokenizer.chat_template = smolvlm_chat_template.replace("<image>", image)
    tokenizer.save_pretrained(model)
    _, tokenizer, sequences = prepared(model, shown)
    rows = [json.loads(line) for line in shown.read_text(encoding="utf-8").splitlines()]
    for sequence, row in zip(sequences, rows, strict=True):
        question, answer = row["messages"][0]["content"][-1]["text"], row["messages"][1]["content"]
        assert question in tokenizer.decode(sequence["input_ids"])
        assert (
            tokenizer.decode([one for one in sequence["labels"] if one != -100]).strip()
            == f"{answer}<end_of_utterance>"
        )


@needs("transformers>=5.17")
def test_a_turn_that_is_not_to_be_learned_is_not(sample, folder):
    said = [*turns([part(image="a.png"), TEXT], "wrong"), *turns([part(image="b.jpg"), TEXT], "right")]
    said[1]["train"] = False
    path = write_rows(folder / "flagged.jsonl", [{"messages": said}])
    _, tokenizer, sequences = prepared(sample("llava"), path)
    assert "wrong" in tokenizer.decode(sequences[0]["input_ids"])
    learned = tokenizer.decode([label for label in sequences[0]["labels"] if label != -100], skip_special_tokens=True)
    assert learned == "right"


@needs("transformers>=5.17")
@pytest.mark.parametrize(("how", "whole", "learned"), [("strip", False, False), ("read", True, False)])
def test_reasoning_is_taken_out_or_only_read(sample, folder, how, whole, learned):
    said = turns([part(image="a.png"), TEXT], "<think>\nSince.\n</think>\n\nright")
    path = write_rows(folder / "reasons.jsonl", [{"messages": said}])
    recipe = seeing.recipe_for(sample("llava"), path, "zero0.json")
    recipe = replace(recipe, data=replace(recipe.data, thinking=how))
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    sequences, _ = tokenize.prepare(str(path), recipe, tokenizer)
    found = tokenizer.decode([label for label in sequences[0]["labels"] if label != -100], skip_special_tokens=True)
    assert ("Since." in tokenizer.decode(sequences[0]["input_ids"])) is whole
    assert ("Since." in found) is learned and found.strip().endswith("right")


@needs("transformers>=5.17")
def test_given_turns_are_not_learned(sample, folder):
    """What a prompt holds is given, an earlier answer too, however long its pictures are."""
    prompt = [*turns([part(image="a.png"), TEXT], "given"), {"role": "user", "content": [part(image="b.jpg"), TEXT]}]
    path = write_rows(folder / "given.jsonl", [{"prompt": prompt, "completion": "learned"}])
    _, tokenizer, sequences = prepared(sample("llava"), path)
    said = tokenizer.decode([label for label in sequences[0]["labels"] if label != -100], skip_special_tokens=True)
    assert said == "learned"


@needs("transformers>=5.17")
def test_pictures_come_from_parquet_as_the_same_tokens(sample, shown, tmp_path):
    rows = []
    for line in shown.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        (*parts, text), answer = row["messages"][0]["content"], row["messages"][1]["content"]
        images = [{"bytes": (shown.parent / one["image"]).read_bytes(), "path": None} for one in parts]
        rows.append({"images": images, "messages": turns("<image>" * len(images) + text["text"], answer)})
    Dataset.from_list(rows).cast_column("images", [ImageFeature()]).to_parquet(tmp_path / "data.parquet")
    *_, paths = prepared(sample("llava"), shown)
    *_, held = prepared(sample("llava"), tmp_path / "data.parquet")
    assert paths["input_ids"] == held["input_ids"] and paths["labels"] == held["labels"]
    assert held[1]["images"][0]["bytes"] and not paths[1]["images"][0]["bytes"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packing": True}, r"packing=true with model\.vision=true: .*; set packing=false"),
        ({"method": "dpo"}, "method=dpo with model.vision=true: only supervised"),
        ({"neftune_alpha": 5.0}, "neftune_alpha"),
        ({"layer_decay": 0.9}, "layer_decay"),
    ],
)
def test_what_is_not_tested_with_pictures_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        replace(pages.find("tiny_vision", "full"), **changes)
    with pytest.raises(UserError, match=r"model\.vision=true"):
        replace(pages.find("tiny", "full"), model=replace(pages.find("tiny", "full").model, train_vision=True))


def test_the_planner_counts_the_tower(sample):
    """Its weights, in fp32 here, and its outputs as tokens of the sequence; a text model has none."""
    recipe = pages.find("tiny_vision", "full")
    request = plan_request(recipe, Cluster(find("H100")))
    weights = load_file(f"{recipe.model.path}/model.safetensors")
    beside = [one for name, one in weights.items() if "vision_tower" in name or "projector" in name]
    assert request.profile.tower_parameters == sum(one.numel() for one in beside)
    assert request.profile.parameters == recipe.model.parameters == sum(one.numel() for one in weights.values())
    assert evaluate(request, recipe).memory.components["vision_tower"] == 4 * request.profile.tower_parameters
    text = pages.find("tiny", "full")
    assert plan_request(text, Cluster(find("H100"))).profile.tower_parameters == 0


@pytest.mark.parametrize(("family", "alone"), [("qwen3_5_moe", True), ("gemma3", False), ("llama", True)])
def test_experts_are_sought_in_the_text_part_where_it_is_loaded_alone(monkeypatch, family, alone):
    config = AutoConfig.for_model(family)
    monkeypatch.setattr(load, "config_of", lambda path, trusted: config)
    monkeypatch.setattr(expert, "find", lambda found: found)
    assert (expert._mixture.__wrapped__("", False) is config.get_text_config()) == alone


READING = SAMPLES / "sight" / "reading"


def rows(name):
    return pq.read_table(READING / f"{name}.parquet").to_pylist()


def test_counts_and_shares_are_the_documented_ones():
    train, held_out = rows("train"), rows("held_out")
    assert (len(train), len(held_out)) == (make_data.TRAIN, make_data.HELD_OUT) == (3000, 300)
    shown = [len(row["images"]) for row in train]
    assert shown.count(0) / 3000 == pytest.approx(1 / 24, rel=0.3)
    assert shown.count(2) / 3000 == pytest.approx(1 / 12, rel=0.3)
    for row in (*train, *held_out):
        question, answer = row["messages"]
        assert question["content"].count("<image>") == len(row["images"]) and answer["content"].strip()


def test_no_held_out_picture_is_trained_on():
    seen = {one["bytes"] for row in rows("train") for one in row["images"]}
    assert not seen & {one["bytes"] for row in rows("held_out") for one in row["images"]}


def test_regeneration_gives_the_same_words_and_pixels():
    committed, made = rows("held_out"), make_data.rows(40, 2026, "held_out")
    for old, new in zip(committed, made, strict=False):
        assert old["messages"] == new["messages"]
        for one, other in zip(old["images"], new["images"], strict=True):
            assert np.array_equal(pixels(one["bytes"]), pixels(other["bytes"]))
    assert make_data.rows(5, 7, "held_out") != made[:5]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_a_drawing_shows_what_it_is_of():
    """Bars have their colour as high as they are, and a hand points where its value is."""
    rng = random.Random(0)
    for _ in range(20):
        bars = ask.any_bars(rng)
        image = np.asarray(draw.draw(bars, rng)).astype(int)
        for column, (colour, height) in enumerate(bars.heights, start=bars.first):
            at = image[:, column * draw.CELL + 2]
            high = (np.abs(at - draw.COLOURS[colour]).sum(-1) < 30).sum()
            assert abs(high - height * draw.CELL / 2) <= 2
    for _ in range(20):
        low, high = (draw.draw(draw.Dial(value), random.Random(1)) for value in (0, 100))
        assert low != high


def test_labels_name_what_is_at_a_place():
    letters, names, numbers = labels.of(draw.Receipt((("tea", 6), ("oil", 28)), 1))
    assert [list(draw.GLYPHS)[one - 1] if one else " " for one in letters[6:12]] == list("TEA  6")
    assert names[12] == 1 + labels.NAMES.index("oil") and numbers[6:12] == [6] * 6
    assert numbers[-6:] == [0] * 6 and numbers[24:30] == [34] * 6
    for rng in map(random.Random, range(50)):
        for kind, found in zip(labels.CLASSES, labels.of(ask.any_picture(rng)), strict=True):
            assert len(found) == labels.SIDE**2 and min(found) >= 0 and max(found) < kind


def test_the_model_is_small_and_loads_in_plain_transformers():
    folder = SAMPLES / "sight" / "model"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**21
    model = AutoModelForImageTextToText.from_pretrained(TINY_VISION)
    assert model.num_parameters() == 491_088
    assert AutoProcessor.from_pretrained(TINY_VISION).image_token == "<|image|>"
