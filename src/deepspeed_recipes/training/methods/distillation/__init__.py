"""Parts of distillation: the divergence, its tiles, the teacher, and numbers of the teacher computed in advance."""
