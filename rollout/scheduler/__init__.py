"""The scheduler process: requests in, steps, records out.  Never imports the tokenizer manager or the client."""
