"""Expert placement.  Needs torch; knows no engine."""
