"""One file a model family: its kinds of layers, as data, without torch.  It imports `rollout.core`."""
