"""Quantises with bitsandbytes, in the training environment."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ...training import distributed
from ...training.model import generation_settings, remote_code


def save(whole: Path, folder: Path, scheme: str) -> None:
    """Write the model in `whole`, in 4-bit normal floats (`nf4`) or 8-bit integers (`int8`), to `folder`.

    fp32 models then compute in bf16, since bitsandbytes' 8-bit product accepts only 16-bit numbers.
    """
    options: dict[str, Any] = {"trust_remote_code": remote_code.permitted(whole)}
    dtype = AutoModelForCausalLM.from_pretrained(whole, dtype="auto", device_map="meta", **options).dtype
    compute = torch.bfloat16 if dtype == torch.float32 else dtype
    if scheme == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    place = str(distributed.device())
    options |= {"quantization_config": config, "device_map": place}
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=compute, **options)
    generation_settings.correct(model, str(whole))
    model.save_pretrained(folder)
