"""The vocabulary of a page: `from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants`."""

from . import variants as variants
from .methods import Distill as Distill
from .methods import Grpo as Grpo
from .recipe import Data as Data
from .recipe import Layout as Layout
from .recipe import Lora as Lora
from .recipe import Model as Model
from .recipe import Recipe as Recipe
from .recipe import Schedule as Schedule
from .samples import CHAT as CHAT
from .samples import SIGHT as SIGHT
from .sections import Wandb as Wandb
