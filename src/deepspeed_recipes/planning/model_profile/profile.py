"""A model's profile: the data on its layers from which memory and time are estimated.

Importing this module costs nothing; `lookup.py` finds a model's profile, and `meta_device.py` computes one from the
model's Hugging Face class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...recipe.recipe import Lora


def training_mode(lora: Lora | None) -> str:
    """Return the name of a training mode, the key of mappings such as `LayerProfile.saved`.

    It is `full`, or the kind of adapters. Adapters of any rank share a name: `lora` is for rank 0, and `lora rank` is
    what each unit of rank adds. Three more names are differences: `masked` is the additional memory of attention with a
    mask, `eager` that of unfused attention, and `split` is the part of `full` that tensor parallelism divides.
    """
    if lora is None:
        return "full"
    words = ["dora" if lora.dora else "lora", "dropout" if lora.dropout else ""]
    if lora.target_modules != "all-linear" or lora.target_parameters:
        words.append(f"({lora.target_modules}; {lora.target_parameters or ''})")
    return " ".join(word for word in words if word)


def further_token_ends(hidden: int) -> int:
    """Return the parameters of a head for a further token outside its layer: its joined inputs' matrix, three norms."""
    return 2 * hidden**2 + 3 * hidden


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that autograd saves in one layer from its forward to its backward pass, on one rank, in bf16.

    A batch of sequences takes `sequences * (per_token * length + per_pair * length**2) + fixed`.
    """

    per_token: float
    per_pair: float = 0.0
    """Per pair of a sequence's tokens: the scores of eager attention, the gates of linear attention's chunks."""
    fixed: float = 0.0
    """Independent of the batch."""

    def of(self, sequences: float, length: float) -> float:
        """Return the bytes for a batch."""
        return sequences * (self.per_token * length + self.per_pair * length**2) + self.fixed

    def __add__(self, other: "SavedBytes") -> "SavedBytes":
        return SavedBytes(self.per_token + other.per_token, self.per_pair + other.per_pair, self.fixed + other.fixed)

    def __rmul__(self, factor: float) -> "SavedBytes":
        return SavedBytes(factor * self.per_token, factor * self.per_pair, factor * self.fixed)


@dataclass(frozen=True)
class LayerProfile:
    """One kind of decoder layer. A model has one or a few (sliding and full attention, dense and expert layers)."""

    parameters: int
    tensor_split: int
    """The part of the parameters that is in matrices split by tensor parallelism."""
    expert_parameters: int
    """The part of the parameters that is in routed experts, of which a token uses only some."""
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of every linear layer, to which adapters can be added."""
    active_weights: float
    """Weights in matrices that a token is multiplied with, including only the experts that it uses."""
    attention_width: int
    """Heads x head width; the forward pass of causal attention costs 2 x width x length per token. 0 for linear
    attention."""
    window: int | None
    """Maximum number of tokens that a token attends to. None if it attends to all before it."""
    experts_per_token: int = 0
    """0 if the layer has no experts."""
    largest_module: int = 0
    """Parameters of the module with the most parameters of its own, which ZeRO-3 gathers at once."""
    modules: int = 0
    """Number of modules with parameters of their own, which ZeRO-3 fetches one after the other: linear layers, norms,
    experts."""
    adapter_parameters: Mapping[str, float] = field(default_factory=dict)
    """Parameters that adapters add, by training mode: at rank 0, and per unit of rank."""
    saved: Mapping[str, SavedBytes] = field(default_factory=dict)
    """Bytes that autograd saves, by training mode."""
    backward_peak: Mapping[str, SavedBytes] = field(default_factory=dict)
    """Bytes at the peak of the layer's backward pass beyond the saved ones, gradients of weights included."""
    checkpoint_bytes: int = 0
    """Bytes per token that checkpointing keeps of the layer: its input, in bf16."""

    @property
    def feed_forward(self) -> tuple[tuple[int, int], ...]:
        """The linear layers of the feed-forward part, routed experts excluded.

        These are the matrices with a dimension equal to the input of the layer's last matrix; `gate` and `up` may be
        one matrix.
        """
        width = self.linears[-1][0] if self.linears else 0
        return tuple(shape for shape in self.linears if {*shape} & {width, 2 * width})


@dataclass(frozen=True)
class ModelProfile:
    """A decoder: its kinds of layers, their order, and the modules before and after them."""

    model_type: str
    hidden_size: int
    vocab_size: int
    attention_heads: int
    key_value_heads: int
    layer_kinds: tuple[LayerProfile, ...]
    layer_order: tuple[int, ...]
    """The index in `layer_kinds` of each layer, from the first."""
    embedding_parameters: int
    """Parameters before the first layer."""
    head_parameters: int
    """Parameters after the last layer: those of the norm and, unless it is tied, the output matrix."""
    tied_embeddings: bool
    """The output matrix is the embedding's."""
    saved_outside_layers: Mapping[str, SavedBytes] = field(default_factory=dict)
    """Bytes that autograd saves outside the layers, by training mode; mostly logits."""
    loss_peak: Mapping[str, SavedBytes] = field(default_factory=dict)
    """Bytes that norm, head and loss need at their peak, forward or backward, beyond the saved ones."""
    tower_parameters: int = 0
    """Parameters of a vision tower and its projector."""

    def __hash__(self) -> int:
        """Return a hash of the fields that have one; equal profiles have equal ones."""
        return hash((self.model_type, self.hidden_size, self.vocab_size, self.embedding_parameters, self.layer_order))

    def cached_per_token(self, layer: LayerProfile) -> float:
        """Return the elements of a token's keys and values that a layer keeps; 0 for linear attention."""
        return 2 * layer.attention_width * self.key_value_heads / self.attention_heads

    def with_further_token(self) -> "ModelProfile":
        """Return the profile with a head for a further token: one more layer like the last, and what joins its inputs.

        With adapters, `counts.saved_parameters` has the head's weights too, as of a module that PEFT keeps twice.
        """
        last = self.layer_kinds[self.layer_order[-1]]
        own = replace(last, adapter_parameters=dict.fromkeys(last.adapter_parameters, 0.0))
        return replace(
            self,
            layer_kinds=(*self.layer_kinds, own),
            layer_order=(*self.layer_order, len(self.layer_kinds)),
            head_parameters=self.head_parameters + further_token_ends(self.hidden_size),
        )

    @cached_property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Every layer, from the first."""
        return tuple(self.layer_kinds[index] for index in self.layer_order)

    @property
    def is_moe(self) -> bool:
        """True if any layer has routed experts."""
        return any(kind.expert_parameters for kind in self.layer_kinds)

    @cached_property
    def parameters(self) -> int:
        """Total number of parameters."""
        decoder = self.embedding_parameters + self.head_parameters + sum(layer.parameters for layer in self.layers)
        return decoder + self.tower_parameters
