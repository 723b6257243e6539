"""The version of this package.

`pyproject.toml` reads it from here, so that a tree that is not installed knows it, too.
"""

VERSION = "0.2.0"
