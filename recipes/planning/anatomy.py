"""What planning knows of a model: the sizes of its parts, and what its layers do to memory and arithmetic.

Frozen data that costs nothing to import; `trace.py` makes it from the Hugging Face class itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.spec.recipe import Lora


def way(lora: Lora | None) -> str:
    """Return how a model is trained, in a word: what `Kind.saved` and its like are looked up by.

    What adapters take more per rank stands under `lora rank`, without that `lora` is of rank 0. What an attention with
    masks takes more than the one that needs none stands under `masked`, what the plain one (`eager`) takes more under
    `eager`; and under `split` the part of `full` that tensor parallelism splits.
    """
    if lora is None:
        return "full"
    words = ["dora" if lora.dora else "lora", "dropout" if lora.dropout else ""]
    if lora.target_modules != "all-linear" or lora.target_parameters:
        words.append(f"({lora.target_modules}; {lora.target_parameters or ''})")
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps of one layer between its forward and its backward pass, on one rank, in bf16.

    For `rows` rows of `length` tokens: `rows * (per_token * length + per_pair * length**2) + fixed`.
    """

    per_token: float
    per_pair: float = 0.0
    """Per pair of tokens of a row: scores of eager attention, the gates of linear attention's chunks."""
    fixed: float = 0.0
    """Whatever the batch."""

    def of(self, rows: float, length: float) -> float:
        """Return the bytes for a batch."""
        return rows * (self.per_token * length + self.per_pair * length**2) + self.fixed

    def __add__(self, other: "Saved") -> "Saved":
        """Return both together."""
        return Saved(self.per_token + other.per_token, self.per_pair + other.per_pair, self.fixed + other.fixed)

    def __sub__(self, other: "Saved") -> "Saved":
        """Return what this is more."""
        return self + -1 * other

    def __rmul__(self, factor: float) -> "Saved":
        """Return a multiple."""
        return Saved(factor * self.per_token, factor * self.per_pair, factor * self.fixed)


@dataclass(frozen=True)
class Kind:
    """One kind of decoder layer: a model has one or a few (sliding and full attention, dense and expert)."""

    parameters: int
    split: int
    """Of the parameters, those in matrices that tensor parallelism splits."""
    routed: int
    """Of the parameters, those in experts, of which a token uses some."""
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of every linear layer, which is what adapters on all of them are added to."""
    multiplied: float
    """Weights that a token is multiplied with: all in matrices, but of the experts only those it uses."""
    attention_width: int
    """Heads x their width; causal attention costs 2 x width x length forward per token. 0: it has none (linear)."""
    window: int | None
    """Tokens that one attends to at most; None: all before it."""
    chosen: int = 0
    """Experts that a token is sent to; 0: the layer has none."""
    largest: int = 0
    """Parameters of the module that has the most of its own: what ZeRO-3 gathers at once."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """Parameters that adapters add, as `way` says: at rank 0, and for each rank."""
    saved: Mapping[str, Saved] = field(default_factory=dict)
    """What autograd keeps, by how the layer is trained (`way`)."""
    working: Mapping[str, Saved] = field(default_factory=dict)
    """What the layer's backward pass takes at its worst moment beyond what was kept, gradients of weights included."""
    checkpoint: int = 0
    """Bytes per token that checkpointing keeps of the layer: its input, in bf16."""


@dataclass(frozen=True)
class Anatomy:
    """A decoder taken apart."""

    model_type: str
    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    """By layer, from the first: which of `kinds` it is."""
    embedding: int
    """Parameters before the first layer."""
    head: int
    """Parameters after the last: norm and output matrix, which counts for nothing where it is tied."""
    tied: bool
    """The output matrix is the embedding's."""
    ends: Mapping[str, Saved] = field(default_factory=dict)
    """What autograd keeps outside the layers: the logits, most of all."""
    loss: Mapping[str, Saved] = field(default_factory=dict)
    """What norm, head and loss take at their worst moment, forward or backward, beyond what is kept."""

    @property
    def layers(self) -> tuple[Kind, ...]:
        """Every layer, from the first."""
        return tuple(self.kinds[index] for index in self.order)

    @property
    def parameters(self) -> int:
        """In all."""
        return self.embedding + self.head + sum(layer.parameters for layer in self.layers)
