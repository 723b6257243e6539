"""Control verbs over HTTP, each made from its message."""
