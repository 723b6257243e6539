"""Where KV lives: slots, the table of each request's slots, the prefix cache."""
