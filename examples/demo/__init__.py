"""`lockstep demo`: one whole step of reinforcement learning, end to end, with its checks."""
