"""Under ZeRO-3 a universal checkpoint gives every group of parameters the first group's settings.

`load_hp_checkpoint_state_from_checkpoint_dir_stage3` copies the first group's hyper-parameters to all groups, so norms
and biases are decayed from then on; and all states share one tensor that counts the steps, which each of them advances.
"""

import argparse
import tempfile

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint import ds_to_universal

RANKS = 1
NUMBERS = {"num_extract_workers": 1, "num_merge_workers": 1}
SWITCHES = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}


def engine(universal: bool) -> DeepSpeedEngine:
    """Return an engine with two groups of parameters, of which only the first is decayed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4))
    decayed, exempt = list(model[0].parameters()), list(model[1].parameters())
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)[0]


def measure() -> tuple[bool, str]:
    """Return whether a decay of 0 changes through a step, a conversion and a load."""
    deepspeed.init_distributed(verbose=False)
    folder = tempfile.mkdtemp()
    trained = engine(universal=False)
    trained.backward(trained(torch.ones(1, 4, device=trained.device)).square().mean())
    trained.step()
    trained.save_checkpoint(folder, tag="step1")
    paths = {"input_folder": f"{folder}/step1", "output_folder": f"{folder}/step1_universal"}
    ds_to_universal.main(argparse.Namespace(**paths, **NUMBERS, **SWITCHES))
    resumed = engine(universal=True)
    resumed.load_checkpoint(folder, tag="step1_universal")
    decays = [group["weight_decay"] for group in resumed.optimizer.optimizer.param_groups]
    return decays != [0.1, 0.0], f"saved with weight decays [0.1, 0.0], loaded with {decays}"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
