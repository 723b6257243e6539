"""The settings of a server and their flags."""
