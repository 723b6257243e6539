"""GRPO against a live server: asynchronous rollouts, replayed routes and sampling masks, a refresh every step."""
