"""Known defects whose library has been mended: their scripts must say that they are absent; executed on every rank."""

import torch
from deepspeed.runtime import engine, utils
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from transformers import TrainerState, trainer_callback

from deepspeed_recipes.prove import prove


def measure(name: str, output: str) -> None:
    """Mend a library and run the defect's script."""
    globals()[name]()
    prove._measure(name, output)


def gradient_norm() -> None:
    """Keep the norm."""

    def clip(self: engine.DeepSpeedEngine) -> None:
        self._global_grad_norm = utils.clip_grad_norm_(self.module.parameters(), self.gradient_clipping(), mpu=self.mpu)

    engine.DeepSpeedEngine.clip_fp32_gradients = clip


def step_of_zeros() -> None:
    """Make no step."""
    unfused_optimizer.FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None


def round_robin_order() -> None:
    """Keep the model's order."""
    stage_1_and_2.DeepSpeedZeroOptimizer._round_robin_reorder = lambda self, weights, _: (
        weights,
        [*range(len(weights))],
    )


def resume_intervals() -> None:
    """Forget a checkpoint's intervals when it is read."""
    load = TrainerState.load_from_json

    def without_intervals(path: str) -> TrainerState:
        state = load(path)
        state.save_steps = 1
        return state

    trainer_callback.TrainerState.load_from_json = staticmethod(without_intervals)


def rotary_frequencies() -> None:
    """Leave tensors alone that are made under zero.Init."""
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = lambda make, **_: make


def expert_gradient_norm() -> None:
    """Return the norm of all experts together."""

    def norm(parameters: list[torch.nn.Parameter], **_: object) -> torch.Tensor:
        total = sum(one.grad.square().sum() for one in parameters)
        torch.distributed.all_reduce(total)
        return total.sqrt()

    utils.clip_grad_norm_ = norm
