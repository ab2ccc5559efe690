"""`python -m recipes.commands COMMAND ...`: what `dsr` is, without an installation."""

import sys

from .main import main

sys.exit(main())
