"""What the methods on preferences share: pairs, log-likelihoods in tiles, and the reference model."""
