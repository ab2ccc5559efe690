"""The sizes in a model's `config.json`: their names, and which are impossible."""

from .errors import UserError
from .files import JsonView

SIZES: dict[str, tuple[tuple[str, ...], int]] = {
    "hidden_size": (("n_embd", "d_model"), 1_000_000),
    "num_hidden_layers": (("n_layer", "n_layers"), 2000),
    "num_attention_heads": (("n_head", "n_heads"), 100_000),
    "num_key_value_heads": ((), 100_000),
    "head_dim": ((), 100_000),
    "intermediate_size": (("n_inner",), 10_000_000),
    "vocab_size": ((), 100_000_000),
    "max_position_embeddings": (("n_positions",), 1_000_000_000),
}
"""Keys of a config.json, each with its other names and a maximum far above any real model's value."""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Every decoder has these; for a missing one transformers takes its class's default, another model's size."""


def size_of(config: JsonView, key: str) -> object:
    """Return a size under any of its names, or None."""
    return next((config[name] for name in (key, *SIZES[key][0]) if config.get(name) is not None), None)


def check_sizes(config: JsonView, name: str) -> None:
    """Refuse impossible sizes, and a config.json without any."""
    if all(size_of(config, key) is None for key in NEEDED):
        raise UserError(f"{name}: has none of {', '.join(NEEDED)}: is this the whole config.json?")
    for key, (_, most) in SIZES.items():
        value = size_of(config, key)
        if isinstance(value, list | None):  # transformers checks whether one value per layer is allowed
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}: {key}={value!r}: must be a whole number of at least 1.")
        if value > most:
            raise UserError(f"{name}: {key}={value}: exceeds the maximum of {most:,}.")
