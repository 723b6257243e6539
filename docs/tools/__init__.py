"""The tools of the documentation site: the reference from the code, and hooks of mkdocs."""
