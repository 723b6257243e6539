"""Frameworks' own client code against a real server: one file and one server a framework, each in its own process.

`make test-integrations` runs them in an environment of pinned wheels; they are no part of `make test-full`.
"""
