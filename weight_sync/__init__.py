"""Weight refresh: a transaction over any transport.  Needs torch and the standard library; knows no engine."""
