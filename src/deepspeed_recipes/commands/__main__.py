"""`python -m deepspeed_recipes.commands COMMAND ...` is `ds-recipes COMMAND ...` without an installation."""

import sys

from .main import main

sys.exit(main())
