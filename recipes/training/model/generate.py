"""A model's greedy answers to conversations."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .control_tokens import conversation_tokens


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, str]]],
    max_new_tokens: int,
    synced_gpus: bool = False,
) -> list[str]:
    """Return the model's greedy answer to each conversation, without surrounding white space."""
    tokens = [conversation_tokens(tokenizer, turns, add_generation_prompt=True) for turns in prompts]
    inputs = tokenizer.pad({"input_ids": tokens}, padding_side="left", return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        synced_gpus=synced_gpus,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = output[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
