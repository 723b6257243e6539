"""Expert placement: a library of its own, which needs torch."""
