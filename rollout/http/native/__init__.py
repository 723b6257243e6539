"""The native dialect: SGLang's `/generate`, sessions, information."""
