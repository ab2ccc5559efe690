"""`python -m deepspeed_recipes.commands COMMAND ...`: what `ds-recipes` is, without an installation."""

import sys

from .main import main

sys.exit(main())
