"""Write the names and defaults that transformers' model types give to their dimensions (17 s).

python -m scripts.maintain.schema.model_types   # after an upgrade of transformers
"""

import json

from deepspeed_recipes.config.rule import DIMENSIONS, MODEL_TYPES
from deepspeed_recipes.recipe import files


def derive(names: list[str] | None = None) -> dict[str, dict]:
    """Return the content of `model_types.json`, for some model types or for all. Imports transformers."""
    from transformers import CONFIG_MAPPING

    result: dict[str, dict] = {}
    for name in names or sorted(CONFIG_MAPPING):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # a few cannot be built without their parts, or need another library
            continue
        found: dict = {}
        for dimension in DIMENSIONS:
            try:
                value = getattr(config, dimension, None)
            except Exception:  # the dimension differs between layers
                continue
            if isinstance(value, int):
                found[dimension] = [config.attribute_map.get(dimension, dimension), value]
        if inner := getattr(getattr(config, "text_config", None), "model_type", None):
            found["text_config"] = inner
        if found:
            result[name] = found
    return result


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in derive().items())
    files.write_text(MODEL_TYPES, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {MODEL_TYPES.name}")
