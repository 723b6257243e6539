"""Parts that the training examples share: a server of their own, progress, the end by a signal."""
