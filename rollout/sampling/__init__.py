"""From logits to tokens.  Knows tensors and sampling parameters; does not know requests."""
