"""The page at `/docs`: every endpoint with its fields, from the server's own `/openapi.json`."""
