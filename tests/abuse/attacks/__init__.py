"""The attacks, one idea a file.  Importing this package puts all of them on the list, in this order."""

from tests.abuse.attacks import (  # noqa: F401
    aborts,
    big_answers,
    cache_keys,
    connections,
    cut_streams,
    fields,
    half_open,
    hostile_grammars,
    keys,
    long_texts,
    raw_bytes,
    readers,
    sessions,
    silence,
    strangers,
    trainers,
    verbs,
    worst_bodies,
)  # isort: skip
