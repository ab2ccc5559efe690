"""What `dsr page` checks: a page's docstring against itself, its dimensions against the Hub, its chat template."""
