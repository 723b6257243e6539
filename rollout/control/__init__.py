"""The control verbs: weights, memory, experts, sessions, profiles."""
