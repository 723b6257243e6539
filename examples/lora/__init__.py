"""Two adapters of one model, trained at once against one server."""
