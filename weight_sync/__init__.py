"""Weight refresh: a transaction over any transport, for any engine that offers `LogicalWeights`."""
