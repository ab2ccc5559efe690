"""The user's own loss, callbacks and metrics, as a rank calls them: an error names the line of the user's file.

The launcher tries them with this module too, so it does not import DeepSpeed, which would take seconds more.
"""

import functools
import inspect
import math
import numbers
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from ..recipe import own_code
from ..recipe.errors import UserError
from ..recipe.files import JsonView, text_of
from ..recipe.own_code import Function, described
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, newest_checkpoint
from .data.collate import IGNORED

EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
"""The methods that a callback may define."""
NEVER = {
    "on_predict": "the run itself measures held-out data",
    "on_prediction_step": "the run itself measures held-out data",
    "on_push_begin": "nothing is pushed during a run",
}
"""Events that do not occur, and why."""
LATE = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events that come after the update, which DeepSpeed makes within the backward pass, and before the gradients are gone
only where it keeps them."""


class Failed(UserError):
    """The user's own code raised, or returned what it must not."""


def check(recipe: Recipe) -> Iterator[str]:
    """Load the recipe's code on every rank, refuse code that differs between them, and yield warnings; a collective."""
    for line in own_code.changed(recipe, recipe.code, own_code.digests(recipe)):
        raise UserError(
            f"{line}: on {socket.gethostname()} the file is not the one that was launched; copy the same file to every "
            "host, and start the run again (--resume continues it)."
        )
    _load_all(recipe)
    if recipe.loss:
        loss = Loss(recipe)
        value, ignores = loss.tried(vocabulary(recipe))
        _check_equal({f"loss={recipe.loss}": value}, "for the same logits and labels")
        if ignores:
            yield (
                f"warning: loss={loss.named}: ignores num_items_in_batch, so its gradients grow with the numbers of "
                "micro-batches and ranks; return the sum over the labelled tokens divided by num_items_in_batch"
            )
    for named in own_code.functions("callbacks", recipe.callbacks):
        own = _own_events(own_code.load("callbacks", named))
        for name in own:
            if name in NEVER:
                yield f"callbacks={named}: {name} is never called: {NEVER[name]}"
        if late := [name for name in own if name in LATE]:
            yield (
                f"callbacks={named}: {' and '.join(late)} come after the update, which DeepSpeed makes at the end of "
                "the backward pass"
            )


def _load_all(recipe: Recipe) -> None:
    for key, found in own_code.of_recipe(recipe).items():
        for function in found:
            if key != "reward":  # its process loads it
                own_code.load(key, function)


def vocabulary(recipe: Recipe) -> int | None:
    """Return the number of entries of the model's vocabulary, or None if the recipe does not know its dimensions."""
    return text_of(recipe.model.config).get("vocab_size")


def _check_equal(mine: JsonView, when: str) -> None:
    """Refuse results that differ between ranks; a collective."""
    if not dist.is_initialized():
        return
    # Not by `distributed`, which imports DeepSpeed and TRL: the launcher imports this module.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(mine))
    for shown, value in gathered[0].items():
        other = next((rank for rank, found in enumerate(gathered) if found[shown] != value), None)
        if other is not None:
            raise Failed(
                f"{shown}: returned {value} on rank 0 and {gathered[other][shown]} on rank {other} {when};\n"
                "it must not depend on the rank, on time or on unseeded random numbers."
            )


def failed(key: str, function: Function, error: BaseException, when: str, run: RunFolder | None) -> Failed:
    """Return the message for an error in the user's code: the last line of its traceback, its place, what is kept."""
    fix = _kept(run) or "correct the file."
    return Failed(f"{key}={function}: {when}: {described(error, function.path)};\n{fix}")


def _kept(run: RunFolder | None) -> str:
    checkpoint = newest_checkpoint(run) if run else None
    return f"{checkpoint} is kept; correct the file, and add --resume." if checkpoint else ""


# ---- Loss ------------------------------------------------------------------------------------------------------------


class Loss:
    """The recipe's own loss as transformers' `compute_loss_func`."""

    def __init__(self, recipe: Recipe, run: RunFolder | None = None, step: Callable[[], int] | None = None) -> None:
        """`step` returns the number of the step that is being computed."""
        (self.named,) = own_code.functions("loss", recipe.loss)
        self.function = own_code.load("loss", self.named)
        self.run = run
        self.step = step
        try:
            self.takes_logits = next(iter(inspect.signature(self.function).parameters), "") == "logits"
            inspect.signature(self.function).bind(None, None, num_items_in_batch=None)
        except (TypeError, ValueError) as error:
            written = own_code.WRITTEN["loss"].format(self.named.name)
            raise Failed(f"loss={self.named}: cannot be called as in `{written}` ({error}).") from None

    def __call__(self, outputs: Any, labels: torch.Tensor | None, num_items_in_batch: object = None) -> torch.Tensor:
        """Return the loss of a micro-batch, a scalar with a gradient; raise `Failed` for anything else."""
        when = f"step {self.step()}" if self.step else "tried on random logits"
        given = outputs.logits if self.takes_logits else outputs
        try:
            loss = self.function(given, labels, num_items_in_batch=num_items_in_batch)
        except (UserError, dist.DistError):
            raise
        except Exception as error:
            raise failed("loss", self.named, error, when, self.run) from error
        if not torch.is_tensor(loss) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if torch.is_tensor(loss) else f"{type(loss).__name__}"
            raise Failed(f"loss={self.named}: {when}: returned {found}; return a scalar tensor.")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise Failed(
                f"loss={self.named}: {when}: returned a tensor without a gradient; compute it from the logits with "
                "torch, without .detach(), .item() or torch.no_grad()."
            )
        return loss.reshape(())

    def tried(self, vocabulary: int | None) -> tuple[float, bool]:
        """Return the loss of random logits, and whether it ignores the number of tokens.

        `vocabulary` is its size, or None if it is unknown. Raises `Failed` as a call does, and for NaN.
        """
        sequences, length, size = 2, 8, vocabulary or 32
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(sequences, length, size, generator=generator).requires_grad_()
        labels = torch.randint(size, (sequences, length), generator=generator)
        labels[:, : length // 2] = IGNORED
        count = (labels[:, 1:] != IGNORED).sum()
        with torch.enable_grad():
            loss = self(CausalLMOutput(logits=logits), labels, count)
            if not torch.isfinite(loss):
                raise Failed(f"loss={self.named}: returned {loss.item()} for random logits; return a finite number.")
            loss.backward()
            twice = self(CausalLMOutput(logits=logits.detach().requires_grad_()), labels, 2 * count)
        if logits.grad is None or not torch.isfinite(logits.grad).all():
            raise Failed(f"loss={self.named}: its gradient does not reach the logits, or is not finite.")
        return loss.item(), twice.item() == loss.item()


# ---- Callbacks -------------------------------------------------------------------------------------------------------


def callbacks(recipe: Recipe, run: RunFolder | None = None, added: set[str] | None = None) -> list[TrainerCallback]:
    """Return the recipe's own callbacks; their errors name the user's line and the run's newest checkpoint.

    `added` collects the names of the numbers that they add to logs. Raises `Failed` for a class that is not a callback
    or cannot be created.
    """
    found = []
    for named in own_code.functions("callbacks", recipe.callbacks):
        kind = own_code.load("callbacks", named)
        if not isinstance(kind, type) or not issubclass(kind, TrainerCallback):
            raise Failed(f"callbacks={named}: is not a subclass of transformers.TrainerCallback.")
        names = set() if added is None else added
        watched = {name: _watched(named, getattr(kind, name), run, names) for name in _own_events(kind)}
        try:
            # A subclass of the same name, by which transformers keeps the state of callbacks in checkpoints.
            found.append(type(kind.__name__, (kind,), watched)())
        except Exception as error:
            raise failed("callbacks", named, error, "cannot be created without arguments", run) from error
    return found


def _own_events(kind: type[TrainerCallback]) -> list[str]:
    return [name for name in EVENTS if getattr(kind, name) is not getattr(TrainerCallback, name)]


def _watched(named: Function, method: Callable[..., Any], run: RunFolder | None, added: set[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(
        self: TrainerCallback, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        logs = kwargs.get("logs") or {}
        before = set(logs)
        try:
            result = method(self, args, state, control, **kwargs)
        except (UserError, dist.DistError):
            raise
        except Exception as error:
            when = f"{method.__name__} at step {state.global_step}"
            raise failed("callbacks", named, error, when, run) from error
        for name in set(logs) - before:
            logs[name] = _number(f"callbacks={named}: logs[{name!r}]", logs[name])
            added.add(name)
        return result

    return call


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def measured(
    recipe: Recipe, answers: Sequence[str], references: Sequence[str], run: RunFolder | None = None, when: str = "tried"
) -> dict[str, float]:
    """Return the numbers of the recipe's own metrics; a collective, of which every rank has all answers.

    Raises `Failed` if a function raised, or returned no finite number, or different numbers on different ranks.
    """
    found: dict[str, float] = {}
    for named in own_code.functions("data.metric", recipe.data.metric):
        shown = f"data.metric={named}"
        function = own_code.load("data.metric", named)
        try:
            value = function(list(answers), list(references))
        except dist.DistError:  # of a collective: a lost rank causes it, not the user's code
            raise
        except Exception as error:
            raise failed("data.metric", named, error, when, run) from error
        try:
            if isinstance(value, Mapping) and value:
                values = {f"{named.name}_{key}": _number(f"{shown}: {key!r}", one) for key, one in value.items()}
                values = {named.name: next(iter(values.values())), **values}
            else:
                values = {named.name: _number(f"{shown}: {when}", value)}
            _check_equal({shown: values}, "for the same answers")
        except Failed as error:
            raise Failed(f"{error}\n{_kept(run)}".rstrip()) from None
        found |= values
    return found


def _number(shown: str, value: object) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        returned = "None" if value is None else f"a {type(value).__name__}"
        raise Failed(f"{shown}: returned {returned}; a number is expected, or a dict of numbers.")
    if not math.isfinite(value):
        raise Failed(f"{shown}: returned {float(value)}; a finite number is expected, such as 0 where it is undefined.")
    return float(value)


def try_all(recipe: Recipe, references: Sequence[str]) -> None:
    """Call the recipe's own loss, and its metrics on references as answers, and create its callbacks."""
    _load_all(recipe)
    if recipe.loss:
        Loss(recipe).tried(vocabulary(recipe))
    callbacks(recipe)
    if references:
        measured(recipe, references, references)
