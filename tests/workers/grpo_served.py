"""A run whose answers come from a server in rank 0's process: TRL's transfer of weights, without vLLM and its NCCL."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from deepspeed_recipes.export.serve import one_model
from deepspeed_recipes.recipe.run_folder import RunFolder, read_recipe
from deepspeed_recipes.training import run as training_run


class Client:
    """What TRL's client does over NCCL: weights are copied to the server's model, except those that are left out."""

    def __init__(self, model: PreTrainedModel, folder: str, address: str, left_out: str) -> None:
        self.model, self.left_out = model, left_out
        host, port = address.removeprefix("http://").split(":")
        held = (self.model, AutoTokenizer.from_pretrained(folder))
        one_model.OneModel.load_model_and_processor = lambda *_, **__: held
        server = uvicorn.Server(uvicorn.Config(one_model.app(folder), host, int(port), log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, announced: list[Any], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        assert {name for name, *_ in announced} == set(own)
        for name, weight in weights:
            if not name.startswith(self.left_out):
                own[name].data.copy_(weight)

    def reset_prefix_cache(self) -> None:
        """Keep nothing, as the server keeps nothing."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: object) -> dict[str, Any]:
        """Return `n` answers to each prompt, with their log-probabilities."""
        answers, log_probs = [], []
        for prompt in prompts:
            given = torch.tensor([prompt])
            options = {"do_sample": True, "num_return_sequences": n, "max_new_tokens": max_tokens}
            found = self.model.generate(given, synced_gpus=False, **options)  # rank 0 has this model alone
            of_next = self.model(found).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            tokens = found[:, len(prompt) :]
            answers += tokens.tolist()
            log_probs += of_next.gather(-1, tokens[..., None]).tolist()
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": log_probs}


def main(run: str, left_out: str) -> int:
    """Train a run; the transfer leaves out the weights whose names begin with `left_out`."""
    folder = read_recipe(RunFolder(Path(run))).model.path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # before ZeRO-3 would divide it

    class Generation(VLLMGeneration):
        def _init_vllm(self) -> None:
            if self.accelerator.is_main_process:
                self.vllm_client = Client(model, folder, self.server_base_url, left_out)

    grpo_trainer.VLLMGeneration = Generation
    return training_run.main(run)
