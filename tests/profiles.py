"""Model profiles written by hand, for tests that need no tracing."""

from dataclasses import replace

from deepspeed_recipes.planning.model_profile.profile import LayerProfile, ModelProfile

ADAPTERS = ("lora", "lora dropout", "dora", "dora dropout")
"""Training modes with adapters on every linear layer."""


def llama(hidden=4096, wide=14336, layers=32, heads=32, shared=8, vocabulary=128256, window=None) -> ModelProfile:
    """Return a Llama's profile; by default that of Llama-3.1-8B."""
    narrow = hidden // heads * shared
    linears = (
        (hidden, hidden),
        (hidden, narrow),
        (hidden, narrow),
        (hidden, hidden),
        (hidden, wide),
        (hidden, wide),
        (wide, hidden),
    )
    weights = sum(inputs * outputs for inputs, outputs in linears)
    per_rank = {f"{mode} rank": float(sum(map(sum, linears))) for mode in ADAPTERS}
    adapters = dict.fromkeys(ADAPTERS, 0.0) | per_rank
    kind = LayerProfile(
        weights + 2 * hidden, weights, 0, linears, weights, hidden, window, modules=9, adapter_parameters=adapters
    )
    head = vocabulary * hidden + hidden
    return ModelProfile(
        "llama", hidden, vocabulary, heads, shared, (kind,), (0,) * layers, vocabulary * hidden, head, False
    )


def mixture(experts=8, chosen=2) -> ModelProfile:
    """Return a Llama whose feed-forward layers are `experts`, of which a token uses `chosen`."""
    dense = llama(layers=8)
    (kind,) = dense.layer_kinds
    feed = 3 * 4096 * 14336
    linears = kind.linears[:4]
    attention = sum(inputs * outputs for inputs, outputs in linears)
    changed = LayerProfile(
        attention + experts * feed,
        attention,
        experts * feed,
        linears,
        attention + chosen * feed,
        4096,
        None,
        chosen,
        modules=8,
        adapter_parameters=kind.adapter_parameters,
    )
    return replace(dense, layer_kinds=(changed,))
