"""A multi-turn agent with a calculator, trained on the token ids that the server recorded."""
