"""What a model's layers hold and compute: the frozen data that every estimate of memory and time is made from.

Importing it costs nothing; `lookup.py` finds a model's profile and `meta_device.py` computes one from its Hugging Face
class.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...recipe.recipe import Lora


def training_mode(lora: Lora | None) -> str:
    """Return the name under which `LayerProfile.saved` and its like hold what a way of training takes.

    `full`, or the kind of adapters. Adapters of any rank share a name: what each rank adds is under `lora rank`, and
    `lora` itself is for rank 0. Three more names are differences: `masked` is what attention with a mask takes beyond
    attention without one, `eager` what the unfused attention takes beyond it, and `split` is the part of `full` that
    tensor parallelism divides.
    """
    if lora is None:
        return "full"
    words = ["dora" if lora.dora else "lora", "dropout" if lora.dropout else ""]
    if lora.target_modules != "all-linear" or lora.target_parameters:
        words.append(f"({lora.target_modules}; {lora.target_parameters or ''})")
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that autograd saves in one layer from its forward to its backward pass, on one rank, in bf16.

    For a batch of sequences: `sequences * (per_token * length + per_pair * length**2) + fixed`.
    """

    per_token: float
    per_pair: float = 0.0
    """Per pair of tokens of a sequence: the scores of eager attention, the gates of linear attention's chunks."""
    fixed: float = 0.0
    """Independent of the batch."""

    def of(self, sequences: float, length: float) -> float:
        """Return the bytes for a batch."""
        return sequences * (self.per_token * length + self.per_pair * length**2) + self.fixed

    def __add__(self, other: "SavedBytes") -> "SavedBytes":
        """Return the sum."""
        return SavedBytes(self.per_token + other.per_token, self.per_pair + other.per_pair, self.fixed + other.fixed)

    def __sub__(self, other: "SavedBytes") -> "SavedBytes":
        """Return the difference."""
        return self + -1 * other

    def __rmul__(self, factor: float) -> "SavedBytes":
        """Return a multiple."""
        return SavedBytes(factor * self.per_token, factor * self.per_pair, factor * self.fixed)


@dataclass(frozen=True)
class LayerProfile:
    """One kind of decoder layer; a model has one or a few (sliding and full attention, dense and expert)."""

    parameters: int
    tensor_split: int
    """Of the parameters, those in matrices that tensor parallelism splits."""
    expert_parameters: int
    """Of the parameters, those in routed experts, of which a token uses some."""
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of every linear layer: what adapters on all of them are added to."""
    active_weights: float
    """Weights that a token is multiplied with: all in matrices, but of the experts only those that it uses."""
    attention_width: int
    """Heads x their width; causal attention costs 2 x width x length forward per token. 0: linear attention."""
    window: int | None
    """Tokens that one attends to at most; None: all before it."""
    experts_per_token: int = 0
    """0: the layer has no experts."""
    largest_module: int = 0
    """Parameters of the module that has the most of its own: what ZeRO-3 gathers at once."""
    modules: int = 0
    """Modules with parameters of their own, which ZeRO-3 fetches one after the other: linear layers, norms, experts."""
    adapter_parameters: Mapping[str, float] = field(default_factory=dict)
    """Parameters that adapters add, by training mode: at rank 0, and per rank."""
    saved: Mapping[str, SavedBytes] = field(default_factory=dict)
    """What autograd saves, by training mode."""
    backward_peak: Mapping[str, SavedBytes] = field(default_factory=dict)
    """What the layer's backward pass needs at its peak beyond what was saved, gradients of weights included."""
    checkpoint_bytes: int = 0
    """Bytes per token that checkpointing keeps of the layer: its input, in bf16."""

    @property
    def feed_forward(self) -> tuple[tuple[int, int], ...]:
        """Of the linear layers, those of the feed-forward part; routed experts are not among them.

        It is those matrices that have the width of the last one's input; `gate` and `up` may be one matrix.
        """
        width = self.linears[-1][0] if self.linears else 0
        return tuple(shape for shape in self.linears if {*shape} & {width, 2 * width})


@dataclass(frozen=True)
class ModelProfile:
    """A decoder: its kinds of layers, their order, and what comes before and after them."""

    model_type: str
    hidden_size: int
    vocab_size: int
    attention_heads: int
    key_value_heads: int
    layer_kinds: tuple[LayerProfile, ...]
    layer_order: tuple[int, ...]
    """For each layer, from the first: its index in `layer_kinds`."""
    embedding_parameters: int
    """Before the first layer."""
    head_parameters: int
    """After the last layer: norm and output matrix, which counts for nothing where it is tied."""
    tied_embeddings: bool
    """The output matrix is the embedding's."""
    saved_outside_layers: Mapping[str, SavedBytes] = field(default_factory=dict)
    """What autograd saves outside the layers, by training mode: above all the logits."""
    loss_peak: Mapping[str, SavedBytes] = field(default_factory=dict)
    """What norm, head and loss need at their peak, forward or backward, beyond what is saved."""
    tower_parameters: int = 0
    """Of a vision tower and what projects its outputs, beside the decoder."""

    @cached_property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Every layer, from the first."""
        return tuple(self.layer_kinds[index] for index in self.layer_order)

    @cached_property
    def layer_counts(self) -> tuple[tuple[LayerProfile, int], ...]:
        """Each kind of layer, with how many there are of it."""
        return tuple((self.layer_kinds[kind], count) for kind, count in Counter(self.layer_order).items())

    @cached_property
    def parameters(self) -> int:
        """In all."""
        decoder = self.embedding_parameters + self.head_parameters + sum(layer.parameters for layer in self.layers)
        return decoder + self.tower_parameters
