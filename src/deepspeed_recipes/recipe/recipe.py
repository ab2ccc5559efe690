"""The `Recipe`: frozen data that describes a run completely before it starts.

A variant is a recipe with a few fields changed: `replace(full(size), deepspeed="zero2.json", lora=Lora(rank=16))`.
The field names are the override keys of the command line (`learning_rate=5e-5 lora.rank=32`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from . import bounds, compatibility, own_code, sections
from .bounds import Bounds, Several
from .errors import UserError
from .files import JsonView
from .methods import METHODS, Method, Sft
from .methods.method import title
from .sections import Lora, Optimizer, Wandb

Precision = Literal["fp32", "bf16", "fp16"]
BUILT_IN = ("loss", "exact_match", "preference_accuracy", "judgement_accuracy")
"""The metrics of `data.metric` that are not the user's own."""
ATTENTION = (
    *("auto", "eager", "sdpa", "varlen", "flex_attention"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
)
"""The values of `model.attention` that are not kernels from the Hub."""
Checkpointing = bool | Literal["selective", "feed_forward"]
PerEpoch = Literal["epoch", "epoch/2", "epoch/3", "epoch/4", "epoch/5", "epoch/10", "epoch/20"]
"""Once per epoch, or so many times: `updates.in_steps` turns it into a number of steps when the data is known."""


@dataclass(frozen=True)
class Model:
    """The model's location and the architecture's dimensions."""

    path: str
    """A Hub id, or a folder in Hugging Face format with safetensors (a relative path starts at the current folder)."""
    parameters: Annotated[int, Bounds(least=0, most=10**15)] = 0
    """Published parameter count; the model built from `config` on the meta device is within 1 % of it."""
    config: JsonView = field(default_factory=dict)
    """`AutoConfig.for_model(**config)`: `model_type` and the dimensions, for planning and drafts without a network."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: load the frozen linear layers in 4 bits (Dettmers et al. 2023, arXiv:2305.14314) with bitsandbytes; needs
    `lora`."""
    chat_template: str = "auto"
    """`auto`: the tokenizer's own template, or ChatML if the tokenizer has none (base models); `chatml`; or a Jinja
    file."""
    new_tokens: Annotated[str | None, Several()] = None
    """Tokens to add to the tokenizer: a text file with one token a line, a JSON file with a list, or tokens separated
    by commas (`<call>,</call>`). In JSON, `{"content": "<call>", "special": true}` makes one special: decoding leaves
    it out, and in what users write it is text. Each starts as the mean of the pieces that it has been split into.
    Adapters train the new rows of the embeddings and of the head, and no others;
    `lora.modules_to_save=embed_tokens,lm_head` trains both whole. Tokens and rows are in every export."""
    attention: str = "auto"
    """Attention implementation, as `from_pretrained(attn_implementation=...)` names it, or `varlen`, torch's own for
    packed sequences. `auto` with packed sequences on a GPU tries flash_attention_3 (on Hopper), flash_attention_4
    (Hopper, Blackwell) and flash_attention_2 where their packages are installed, then varlen and flex_attention, and
    takes the first with which a draft keeps documents apart. None of these needs a mask of length times length, with
    which SDPA cannot use its flash kernel and computes all pairs of tokens of a sequence. In every other case `auto` is
    `sdpa`. With the `kernels` package, `kernels-community/flash-attn3` downloads a prebuilt kernel from the Hub."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository. Leave it off unless you have read that code."""
    vision: bool = False
    """Load the model with its vision tower, and train on conversations with images. `false` trains on text alone."""
    train_vision: bool = False
    """Train the vision tower too, or add adapters to it and to its projector. `false` freezes both."""
    train_mtp: bool = False
    """Train the base model's head for a further token too (MTP), with which servers draft. With adapters the head is
    trained whole, in a file of its own next to them, and a merged export has it under the base model's names."""
    mtp_loss_weight: Annotated[float, Bounds(above=0)] = 0.1
    """Weight of that head's cross-entropy in the loss. The DeepSeek-V3 report (arXiv:2412.19437) starts with 0.3 and
    ends with 0.1."""


@dataclass(frozen=True)
class Data:
    """The training data and the held-out data."""

    path: Annotated[str, Several()]
    """A file (.jsonl, .json, .csv, .parquet, .arrow; .txt for `pretrain`), a folder of such files, or a Hub dataset;
    separate several with commas."""
    columns: Annotated[str | None, Several()] = None
    """Renames columns, as `COLUMN:FIELD` pairs separated by commas: `question:prompt,answer:completion`. The fields
    `role` and `content` rename keys of turns: `speaker:role,text:content`. Of several sources, each renames the columns
    that it has."""
    roles: Annotated[str | None, Several()] = None
    """Renames roles of turns, as `NAME:ROLE` pairs separated by commas: `customer:user,agent:assistant`."""
    system: str | None = None
    """System prompt of every example that has none. Give it again when you ask the trained model (`--system`)."""
    join_turns: bool = False
    """Join consecutive turns of one role, with a line break between them. `false` refuses two of the user's."""
    bad: Literal["stop", "skip"] = "stop"
    """What to do about examples that cannot be used, such as lines that are not JSON and turns without content. `stop`
    ends the run before training and names the first ten; `skip` trains without them, and counts them in the summary and
    the report."""
    weights: Annotated[str | None, Several()] = None
    """Proportions in which several sources are mixed, separated by commas (`3,1`). None uses every example of each
    source once."""
    form: Literal[
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "preference",
        "preference_messages",
        "judged",
        "judged_messages",
        "judged_sharegpt",
        "judged_alpaca",
        "text",
        "prompt",
        "labelled_text",
        "labelled_prompt",
        "labelled_messages",
        "anchor_positive",
        "query_positive",
    ] = "auto"
    """Format of the examples. `auto` detects the format from their fields, and the run prints which format it found."""
    thinking: Literal["learn", "read", "strip"] = "learn"
    """How to treat reasoning in the assistant's turns (`reasoning_content`, or `<think>...</think>` before the answer),
    as far as the chat template renders it. `learn` counts it in the loss; `read` keeps it in the sequence and out of
    the loss; `strip` removes it from the examples."""
    max_examples: Annotated[int | None, Bounds(least=1)] = None
    """Maximum number of training examples, sampled with the run's seed. None uses all of them. A small number tries a
    recipe out, or shows how much more data would help."""
    split: str = "train"
    """Split that is read of a Hub dataset, of a folder that `save_to_disk` wrote, or of a folder with files named for
    splits, such as train.jsonl and test.jsonl. A run names the splits that it does not read; `data.validation` may
    name one of them."""
    streaming: bool = False
    """Read the data during training instead of before it, for data that does not fit on the disk. Needs `max_steps`."""
    validation: Annotated[str | None, Several()] = None
    """Held-out examples, in the same format as `data.path`: files, folders (FOLDER/test is a split of one that
    `save_to_disk` wrote), or splits of Hub datasets, OWNER/NAME/SPLIT. None turns evaluation off unless
    `validation_share` is set. A page's held-out examples do not fit other data, so setting `data.path` alone replaces
    them with `validation_share=auto`."""
    validation_share: Annotated[float | Literal["auto"], Bounds(least=0, below=1, usual=0.05)] = 0.0
    """Share of the examples that is held out if `validation` is None. `auto` is 5 %, and at most 500 examples."""
    metric: Annotated[str, Several()] = "loss"
    """Metric on the held-out examples that the last line reports before and after training: `loss`, `exact_match`
    (answers reproduced exactly), `preference_accuracy` or `judgement_accuracy` (pairs ranked correctly), or your own
    function, `FILE.py:FUNCTION`. Several are separated by commas; the first one judges the run. A page's `exact_match`
    is chosen for the page's own examples, so setting `data.path` or `data.validation` replaces it with `loss`.

    `exact_match` compares the last answer of each held-out conversation with everything that training would have the
    model write there, including think blocks and tool calls, and ignores white space at both ends.

    Your own function is called as `function(answers, references)` with the model's greedy answers and the expected
    ones, lists of texts in the order of the held-out examples. It returns a number, reported under the function's name,
    or a dict of numbers, the first of which is reported under the function's name and each as `FUNCTION_KEY`. Higher
    values count as better. Every rank calls it with all answers, and their results must be equal."""
    transform: str | None = None
    """Your own function, `FILE.py:FUNCTION`, called with each training and held-out example as a dict, as it is in its
    file, before its form is detected. It returns an example, or None to drop it, which the run counts."""
    max_pixels: Annotated[int, Bounds(least=784)] = 1_000_000
    """Larger images are scaled down to this many pixels before the model's own processor reads them. For models that
    accept images of any size, this bounds the tokens per image."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 96
    """Longest answer that the exact-match metric generates, in tokens. An answer that is cut off counts as wrong."""
    sample_answers: Annotated[int | None, Bounds(least=0, most=100)] = None
    """Number of held-out questions that the model answers before and after training, for the report, where the metric
    generates no answers. None is three answers of at most 64 tokens, where the method trains on conversations and the
    layout can generate."""
    workers: Annotated[int | None, Bounds(least=0, most=1024)] = None
    """Data loader processes per rank; 0 loads in the training process. None: 2 on a GPU, so that the GPU does not wait
    for the next batch; 0 for streams and without a GPU, where the workers would take cores from the computation."""
    changed: bool = False
    """With `--resume`: accept data, held-out data, an order or a tokenizer that differs from the checkpoint's."""

    @property
    def metrics(self) -> list[str]:
        """The names under which the metrics are reported; the first one judges the run."""
        return [name.rpartition(":")[2] for name in names(self.metric)]


@dataclass(frozen=True)
class Layout:
    """Number of ranks that share one copy of the model, by kind of parallelism; remaining ranks are data parallel."""

    tensor: Annotated[int, Bounds(least=1)] = 1
    """Ranks that split every matrix."""
    pipeline: Annotated[int, Bounds(least=1)] = 1
    """Stages that split the layers."""
    sequence: Annotated[int, Bounds(least=1)] = 1
    """Ranks that split every sequence."""
    expert: Annotated[int, Bounds(least=1)] = 1
    """Ranks that split the experts of a mixture-of-experts model; each rank reads different sequences."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run."""

    kind: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "cosine"
    """The shape after the warm-up, by transformers' name (`lr_scheduler_type`): `linear` and `cosine` fall to zero;
    `constant` has no warm-up; `warmup_stable_decay` (also `wsd`) falls at the end."""
    warmup: Annotated[float, Bounds(least=0, steps=True)] = 0.03
    """Share of the steps during which the learning rate rises, from above zero to the full rate in the last of them; 1
    or more is their number. transformers starts at zero, with a step that is left out here; a share is of all steps and
    this one."""
    min_rate: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Share of the learning rate to which `cosine_with_min_lr`, `cosine_warmup_with_min_lr`, `polynomial` and
    `warmup_stable_decay` fall; the warm-up of the last one also begins there."""
    cycles: Annotated[int, Bounds(least=1)] = 1
    """Number of times that `cosine_with_restarts` falls from the full rate."""
    power: Annotated[float, Bounds(above=0)] = 1.0
    """Exponent of `polynomial`; 1 is a straight line."""
    decay: Annotated[float, Bounds(above=0, steps=True)] = 0.1
    """Share of the steps, at the end, during which `warmup_stable_decay` falls; 1 or more is a number of steps. If the
    run has fewer, it falls as soon as the warm-up ends."""
    decay_type: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Shape of the fall of `warmup_stable_decay`."""
    timescale: Annotated[int | None, Bounds(least=1)] = None
    """Number of steps that scales `inverse_sqrt`. None uses the warm-up's, or 10,000 without one."""


@dataclass(frozen=True)
class Draft:
    """The same recipe on a shrunken, randomly initialised model of the same class."""

    enabled: bool = False
    layers: Annotated[int, Bounds(least=1, most=1024)] = 2
    """Number of layers of the draft model."""
    hidden_size: Annotated[int, Bounds(least=16, most=65536)] = 64
    """Hidden size of the draft model."""


@dataclass(frozen=True)
class Profile:
    """The steps and ranks that `ds-recipes launch --profile` records."""

    steps: str | None = None
    """First and last step to record (`10:12`). `auto` records three steps after the warm-up; None records nothing."""
    ranks: Annotated[str, Several()] = "auto"
    """Ranks to record, separated by commas, or `all`. `auto`: all ranks if there is one host, otherwise the first rank
    of each host."""
    nsys: bool = False
    """Mark the steps for Nsight Systems, under which `--nsys` starts the ranks, instead of using torch.profiler."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run: model, data, method, optimisation, DeepSpeed configuration and parallel layout."""

    family: str = ""
    """Identifies the recipe, together with `size` and `variant`: `pages.find` fills all three in, a page never does."""
    size: str = ""
    variant: str = ""
    page: str = ""
    """The file of a page outside the project; empty for the project's own pages."""
    borrower: str = ""
    """The name of a model that borrows the recipe of another model's page (`launch auto`), or empty."""
    model: Model
    data: Data
    deepspeed: str = "zero3.json"
    """A file in `configs/`, or a path to any DeepSpeed JSON."""
    lora: Lora | None = None
    layout: Layout = Layout()
    schedule: Schedule = Schedule()
    method: Method = field(default_factory=Sft)
    """The training method with its settings, whose override keys begin with its name: `dpo.beta`."""
    draft: Draft = Draft()
    tracking: Annotated[str | None, Several()] = "wandb"
    """Trackers that receive the values of metrics.jsonl, separated by commas: `wandb`, `tensorboard`, `mlflow`,
    `trackio`. None uses no tracker."""
    wandb: Wandb = field(default_factory=Wandb)
    profile: Profile = Profile()
    reward: Annotated[str | None, Several()] = None
    """Functions that score the answers of `grpo`: `FILE.py:FUNCTION`, separated by commas. Each is called with an
    answer and the fields of its example, and returns a number. This is your own code, run without a sandbox."""
    callbacks: Annotated[str | None, Several()] = None
    """Your own subclasses of transformers' TrainerCallback: `FILE.py:CLASS`, separated by commas. Each is created
    without arguments on every rank, before the run's own callbacks, so that what it adds to `logs` in `on_log` is in
    metrics.jsonl too. All ranks log, evaluate, save or stop where the callback of any rank sets `control.should_*`."""
    loss: str | None = None
    """Your own loss of `sft` and `pretrain`, `FILE.py:FUNCTION`, with the signature of transformers' compute_loss_func:
    `function(outputs, labels, num_items_in_batch)` returns the sum over a micro-batch divided by `num_items_in_batch`,
    the number of labelled tokens of the step on all ranks. `outputs.logits` are [sequences, length, vocabulary], and a
    first parameter named `logits` gets these; `labels`, [sequences, length], are not shifted, and -100 is not in the
    loss. The held-out `loss` remains the cross-entropy."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of the files with your own code, by key, when the run was launched: the launcher fills it in."""
    optimizer: Optimizer = "adamw"
    """`adamw`: AdamW; `adamw_8bit`: AdamW with moments in 8 bits, 2 instead of 8 bytes per weight (Dettmers et al.
    2021, arXiv:2110.02861), by bitsandbytes; `muon`: AdamW for embeddings, head and norms, and orthogonalised updates
    for matrices (Liu et al. 2025, arXiv:2502.16982), by DeepSpeed, at AdamW's rates."""
    learning_rate: Annotated[float, Bounds(above=0, usual=2e-5)] = 2e-5
    """Peak learning rate; `schedule` sets how it rises and falls."""
    layer_decay: Annotated[float, Bounds(above=0, most=1, usual=0.9)] = 1.0
    """Ratio of each layer's learning rate to that of the layer above, from the head down to the embeddings, so that
    the first layers change least (Clark et al. 2020, arXiv:2003.10555). 1 gives all layers the same rate."""
    train: str | None = None
    """Regular expression for the names of the weights to train, searched in names such as
    `model.layers.31.mlp.up_proj.weight`; all others are frozen. Not for adapters. None trains all."""
    freeze: str | None = None
    """Regular expression for the names of weights to freeze, among those that `train` matches. A head that shares the
    embeddings' weight has their name."""
    weight_decay: Annotated[float, Bounds(least=0)] = 0.0
    """AdamW's weight decay, applied to all weights except norms and biases."""
    adam_beta2: Annotated[float, Bounds(above=0, below=1)] = 0.999
    """Adam's decay rate for the average of squared gradients."""
    adam_epsilon: Annotated[float, Bounds(least=1e-30)] = 1e-8
    """Term that Adam adds to the denominator."""
    max_grad_norm: Annotated[float, Bounds(least=0)] = 1.0
    """Gradients are clipped to this global norm. 0 turns clipping off, as Muon needs, whose updates have fixed
    norms."""
    epochs: Annotated[float, Bounds(above=0, most=1_000_000, usual=1)] = 1.0
    """Passes over the training data."""
    max_steps: Annotated[int | None, Bounds(least=1)] = None
    """Optimizer steps; when set, `epochs` is ignored."""
    global_batch_size: Annotated[int, Bounds(least=1)] = 32
    """Sequences per optimizer step over all ranks; with packing, packed sequences."""
    micro_batch_size: Annotated[int, Bounds(least=1)] = 1
    """Sequences per forward pass and GPU."""
    sequence_length: Annotated[int, Bounds(least=8)] = 2048
    """Longest sequence in tokens. Longer conversations are dropped unless `truncate` is set; longer raw texts are
    split."""
    truncate: bool = False
    """Train on the beginning of conversations that are longer than `sequence_length` instead of dropping them. A cut
    answer does not teach the model to stop. Held-out conversations are cut too, or dropped if `data.metric` compares
    their answers."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """The turns of a conversation that are in the loss: all of the assistant's, only the `last` of them, or `all`
    tokens, with the user's turns and the template's own words."""
    packing: bool = True
    """Pack several documents into one sequence; they never attend to each other."""
    neftune_alpha: Annotated[float, Bounds(least=0)] = 0.0
    """Add noise to the embeddings of training examples, uniform within alpha / sqrt(length x width) of each document
    (NEFTune, Jain et al. 2023, arXiv:2310.05914, which uses 5 to 15). 0 adds no noise."""
    precision: Precision = "bf16"
    """Precision in which the model is loaded and computed; the optimizer also keeps fp32 weights."""
    router_aux_loss_coef: Annotated[float, Bounds(least=0)] = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model, which keeps the experts evenly used. 0 (usual
    for fine-tuning) leaves this loss out, whatever `output_router_logits` and `router_aux_loss_coef` are in
    config.json."""
    gradient_checkpointing: Checkpointing = True
    """Recompute activations in the backward pass: about a third more compute for much less memory. `selective` keeps
    the results of matrix products and attention and recomputes the cheap operations, at a few percent more compute;
    `feed_forward` recomputes only the feed-forward layers, which hold most activations."""
    activation_offloading: bool = False
    """Keep the layers' inputs, which gradient checkpointing keeps on the GPU, in host memory between the two passes,
    for sequences so long that these inputs fill a GPU. Copies overlap with the computation; needs
    gradient_checkpointing=true."""
    tiled_loss: bool | None = None
    """Compute the loss for some tokens at a time, so that whole logits never exist. This costs one more product with
    the output matrix, for labelled tokens only. None uses tiles if whole logits would take a GiB or more and tiles
    compute the same loss as the model's own head, which is checked on a shrunken model before the run."""
    tiled_mlp: bool = False
    """Compute feed-forward layers for some tokens at a time, for sequences so long that one layer's activations do not
    fit. This computes their forward pass once more."""
    compile: Literal["off", "regional"] = "off"
    """`regional`: apply torch.compile to each layer separately, so that all layers share one compilation. It takes a
    minute at the start, and again for every new sequence length. Not available under ZeRO-3, whose fetches break the
    graph."""
    liger_kernel: bool = False
    """Use Liger's fused RMSNorm, RoPE and SwiGLU on a GPU if Liger is installed (pip install liger-kernel)."""
    fp8: bool = False
    """Multiply in 8-bit floats in the decoder's linear layers during training, with torchao (pip install torchao), on
    Ada, Hopper and later GPUs. Weights, gradients and evaluation stay in bf16; not available with adapters. CPU ranks
    emulate it, so that a draft can try it."""
    numa_binding: bool = True
    """On machines with several NUMA nodes, keep each rank on the cores of its GPU's NUMA node, unless that node has
    more GPUs than its cores can serve."""
    seed: Annotated[int, Bounds(least=0, below=2**32)] = 42
    """Seed for the order of the data and the initial adapters. The same examples are held out whatever the seed."""
    logging_steps: Annotated[int, Bounds(least=1)] = 10
    """Number of steps between logs; the first and the last step are always logged."""
    layer_stats: bool | None = None
    """Log per layer: gradient norm, size of the update relative to the weights, and share of weights without a
    gradient. None turns this on unless the optimizer is offloaded, where the host would have to compute it. Not
    available under tensor parallelism with ZeRO 2 and 3."""
    eval_steps: Annotated[int | PerEpoch | None, Bounds(least=1)] = None
    """Number of steps between evaluations of the held-out loss; `epoch` evaluates after every epoch, `epoch/4` four
    times per epoch. None evaluates only before and after training, or with `early_stopping` or `keep_best` every
    `save_steps`."""
    eval_examples: Annotated[int | None, Bounds(least=1)] = None
    """Number of held-out examples on which these evaluations also compute the metric. None computes only the loss, or
    with `early_stopping` or `keep_best` the metric on all of them."""
    early_stopping: Annotated[int | None, Bounds(least=1)] = None
    """Stop after this many evaluations in a row that are no better than the best one, by the metric that judges the run
    (`data.metric`, or the method's own; of your own functions, higher is better). The held-out loss decides between
    equal values; for preferences the margin does, and for GRPO the reward. Needs held-out data. None trains all
    steps."""
    keep_best: bool = False
    """Export the weights of the best evaluation instead of the last step's, by the same metric and, between equal
    values, by the same loss, margin or reward as `early_stopping`. An evaluation that is the best so far writes a
    checkpoint, which stays on disk in addition to `keep_checkpoints` others."""
    save_steps: Annotated[int | PerEpoch, Bounds(least=0)] = 500
    """Number of steps between checkpoints; `epoch` writes one after every epoch, `epoch/2` two per epoch. 0 writes only
    the final export."""
    keep_checkpoints: Annotated[int, Bounds(least=2)] = 2
    """Number of checkpoints to keep on disk, at least 2, so that one survives while the next is written."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """If the loss or the gradient norm is not finite: `stop` ends the run; `skip` skips that update, as DeepSpeed does;
    `rewind` returns to the newest checkpoint and trains without those examples (PaLM, Chowdhery et al. 2022,
    arXiv:2204.02311)."""
    on_spike: Literal["warn", "stop", "rewind"] = "warn"
    """What to do if a logged loss is 6 standard deviations above the mean of the previous 128 (OLMo-core's skip-step
    rule)."""
    hang_minutes: Annotated[float, Bounds(least=0.01, most=525_600, zero=True)] = 25.0
    """If no step ends for this many minutes, write every rank's Python stack into the run folder and end the run. 0
    turns this off. The default is below the collectives' own timeout of 30 minutes, which gives no cause."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if not isinstance(self.method, Method):  # a page outside the project may name the method
            if not isinstance(self.method, str) or self.method not in METHODS:
                raise UserError(f"method={bounds.shown(repr(self.method))}: must be one of {', '.join(METHODS)}.")
            object.__setattr__(self, "method", METHODS[self.method]())
        bounds.check(self)
        for key in ("train", "freeze"):
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise UserError(f"{key}={getattr(self, key)}: not a regular expression: {error}.") from None
        attention = self.model.attention
        if attention not in ATTENTION and "/" not in attention and not self.model.trust_remote_code:
            raise UserError(
                f"model.attention={bounds.shown(attention)}: must be one of {', '.join(ATTENTION)}, or a kernel of the "
                "Hub, OWNER/NAME."
            )
        sections.check_trackers(names(self.tracking), self.wandb)
        found = names(self.data.metric)
        for name in found or [self.data.metric]:
            if name not in BUILT_IN and not own_code.is_own(name):
                raise UserError(
                    f"data.metric={bounds.shown(name)}: must be one of {', '.join(BUILT_IN)}, or FILE.py:FUNCTION."
                )
        if len(set(self.data.metrics)) < len(found):
            raise UserError(f"data.metric={self.data.metric}: two metrics have the same name; rename the function.")
        own_code.of_recipe(self)
        compatibility.check(compatibility.Case(self), "recipe")
        self.method.check(self)
        if rest := self.global_batch_size % self.micro_batch_size:
            batch, micro = self.global_batch_size, self.micro_batch_size
            fitting = math.gcd(batch, micro)
            smaller = f" or micro_batch_size={fitting}" if fitting >= self.method.least_micro_batch else ""
            raise UserError(
                f"global_batch_size={batch} is not a multiple of micro_batch_size={micro}; use "
                f"global_batch_size={batch - rest + micro}{smaller}."
            )

    @property
    def name(self) -> str:
        """`family-size-variant` or `borrower-variant`, the name of its run folders and of its W&B runs."""
        return f"{self.borrower or f'{self.family}-{self.size}'}-{self.variant}"

    @property
    def metric(self) -> str:
        """The metric that judges the run: the method's own, or `data.metric` if the method has none."""
        return self.method.judged_by(self.data.metrics[0])

    @property
    def tie_breaker(self) -> str:
        """The number that decides between evaluations with equal metrics: the loss, a margin or a mean reward."""
        own = self.method.judged_by("loss")
        if own.endswith("_accuracy"):
            return own.replace("_accuracy", "_margin")
        return "loss" if self.method.metric else own

    @property
    def judged_by(self) -> str:
        """The metric that judges the run and what decides between equal values, for display."""
        ties = "" if self.tie_breaker == self.metric else f" (ties: by {title(self.tie_breaker)})"
        return f"{title(self.metric)}{ties}"

    @property
    def trains_some(self) -> bool:
        """True if only some of the model's own weights are trained, by `train` or `freeze`."""
        return self.train is not None or self.freeze is not None

    def trains(self, name: str) -> bool:
        """Return whether a weight of this name is trained, in a recipe without adapters."""
        chosen = self.train is None or re.search(self.train, name) is not None
        return chosen and not (self.freeze is not None and re.search(self.freeze, name))

    @property
    def picks(self) -> bool:
        """True if evaluations during training decide when the run ends or what it exports."""
        return self.keep_best or self.early_stopping is not None

    @property
    def steps_between_evaluations(self) -> int | PerEpoch | None:
        """Number of steps between evaluations during training, or None if there are none."""
        return self.eval_steps or (self.save_steps if self.picks else None)

    @property
    def trackers(self) -> list[str]:
        """The names of the trackers that the run reports to."""
        return [name for name in names(self.tracking) if name != "wandb" or self.wandb.mode != "disabled"]

    @property
    def packs(self) -> bool:
        """True if documents share sequences: `packing` is set and the method supports it."""
        return self.packing and self.method.packs


def changed(recipe: Recipe, **changes: Any) -> Recipe | None:
    """Return the changed recipe, or None if the changes are invalid (GRPO's batches are whole groups, for example)."""
    try:
        return replace(recipe, **changes)
    except UserError:
        return None


def names(text: str | None) -> list[str]:
    """Return the values of a field that takes several, separated by commas, such as `data.path`."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
