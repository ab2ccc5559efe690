"""Makes the sample models and datasets in src/deepspeed_recipes/samples/."""
