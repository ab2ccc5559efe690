"""Writes the files with which sentence-transformers loads an embedding model, including its pooling.

In the form of its versions 2 to 5, which later versions also read.
"""

import shutil
from pathlib import Path

from ...recipe.files import Json
from ...recipe.methods import Embed
from ...recipe.run_folder import write_json

POOLING, NORMALIZE = "1_Pooling/config.json", "2_Normalize/config.json"
FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", POOLING, NORMALIZE)
MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
"""The stages of an embedding, and the folder of each stage's settings."""


def write(folder: Path, settings: Embed, hidden_size: int, longest: int) -> None:
    """Write the files next to the weights of an embedding model or its adapter.

    Args:
        folder: has the weights.
        settings: how the model was trained to embed.
        hidden_size: of the model.
        longest: maximum number of tokens per text; longer texts are cut.
    """
    contents: Json = {
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (kind, path) in enumerate(MODULES)
        ],
        "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "__version__": {},
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        POOLING: {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": settings.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False,
            "pooling_mode_lasttoken": settings.pooling == "last",
            "include_prompt": True,
        },
        NORMALIZE: {},
    }
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, contents[name])


def copy(source: Path, folder: Path) -> None:
    """Copy the files if `source` has them."""
    for name in FILES:
        if (source / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(source / name, folder / name)
