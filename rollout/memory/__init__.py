"""The memory of KV: slots, the table of each request's slots, the prefix cache."""
