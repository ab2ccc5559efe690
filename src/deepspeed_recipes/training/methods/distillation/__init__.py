"""What distillation is made of: the divergence, its tiles, the teacher, and what is computed of it beforehand."""
