"""Whether this stack trains what it should: techniques beside a plain loop, and known defects of libraries."""
